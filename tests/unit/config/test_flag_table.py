"""Every documented flag is declared with its name, attribute and default; the declarations are consistent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from slime.config import megatron_flags, registry
from slime.config.parse import parse_raw
from slime.config.spec import TYPES
from slime.config.status import NOOP, UNBUILT

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "config"
DOCUMENTED = json.loads((ASSETS / "documented_flags.json").read_text())
#: Switches that the framework gives a --no- form, so that "not given" is a state of its own.
TRI_STATE = {"--use-tensorboard": None}


def test_every_documented_flag_has_its_attribute_and_default():
    args = vars(parse_raw([])[0])
    flags = {flag.name: flag for flag in registry.all_flags()}
    wrong = []
    for row in DOCUMENTED:
        flag = flags.get(row["flag"])
        default = TRI_STATE.get(row["flag"], row["default"])
        if flag is None or flag.dest != row["dest"] or args[row["dest"]] != default:
            wrong.append((row, args.get(row["dest"])))
    assert not wrong
    assert len(DOCUMENTED) > 200


def test_names_and_attributes_are_unique():
    flags = registry.all_flags()
    names = Counter(name for flag in flags for name in (flag.name, *flag.aliases))
    assert [name for name, count in names.items() if count > 1] == []
    dests = Counter(flag.dest for flag in flags)
    assert [dest for dest, count in dests.items() if count > 1 and dest != "enable_one_logger"] == []


def test_declarations_are_complete():
    for flag in registry.framework_flags():
        assert flag.type in TYPES, flag.name
        assert flag.section and flag.owner and flag.help, flag.name
        assert flag.src in ("S", "s", "U", "X", "O"), flag.name
        assert flag.help[0] != " " and not flag.help.endswith("."), flag.name
        assert flag.status == "live" or len(flag.reason) > 10, flag.name


def test_status_tables_name_existing_flags_and_do_not_overlap():
    dests = {flag.dest for flag in registry.framework_flags()}
    assert set(UNBUILT) <= dests and set(NOOP) <= dests
    assert not set(UNBUILT) & set(NOOP)


def test_unbuilt_values_are_choices_of_their_flag():
    for flag in registry.framework_flags():
        values = UNBUILT.get(flag.dest, ("", None))[1]
        if values is not None and flag.choices:
            assert set(values) <= set(flag.choices), flag.name
            assert flag.default not in values, flag.name


def test_every_field_of_megatron_is_a_flag_or_listed_as_internal():
    dests = {flag.dest for flag in megatron_flags.flags()} | {flag.dest for flag in registry.framework_flags()}
    fields = set(megatron_flags.recorded_fields())
    assert fields - dests - megatron_flags.INTERNAL == set()
    assert megatron_flags.INTERNAL <= fields


def test_megatron_flags_are_mapped_or_have_a_reason():
    for flag in megatron_flags.flags():
        assert flag.status == "live" or len(flag.reason) > 10, flag.name


def test_our_own_flags_are_declared():
    names = {flag.name for flag in registry.framework_flags()}
    ours = """--rollout-engine --precision --rollout-precision --run-name --output-dir --config --no-resume --max-staleness
        --strict-args --allow-unknown-args --ray-address --omp-num-threads --rm-model-path --rm-timeout""".split()
    assert set(ours) <= names
