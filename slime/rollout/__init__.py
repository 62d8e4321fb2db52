"""The rollout side: prompts in, scored samples out, over HTTP only."""


def __getattr__(name: str):
    if name == "generate_single":
        from slime.rollout.conversation import generate_single

        return generate_single
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
