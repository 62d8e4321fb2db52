"""Verifiable instructions of IFEval and IFBench: for each id a response that follows it and ones that do not."""

from __future__ import annotations

import time

import pytest

from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.instructions import CHECKS, follows
from slime.rollout.rm_hub.instructions.language import language_of
from slime.rollout.rm_hub.instructions.lexicon import AFRICAN_COUNTRIES, EUROPEAN_CAPITALS_NORTH_OF_45
from slime.rollout.rm_hub.instructions.text import sentences, syllables

AT_LEAST, LESS = "at least", "less than"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CITY = "ID,Country,City,Year,Count\n" + "".join(f"{i},France,Paris,20{i}0,5\n" for i in range(1, 8))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "".join(f"{i},toy,abc,5,9\n" for i in range(13))
GRADES = "\n".join(
    '"' + '"\t"'.join(row.split()) + '"' for row in ["StudentID Subject Grade Semester Score", *["1 a B 2 3"] * 3]
)
QUESTIONS = "\n".join(
    f"Question {n}: What is {'really ' * n}art?\nA) one\nB) two\nC) three\nD) four\nE) five" for n in range(1, 5)
)
COUNTRIES = "\n".join(sorted((names[0].title() for names in AFRICAN_COUNTRIES), reverse=True))
CAPITALS = ", ".join(names[0].title() for names in EUROPEAN_CAPITALS_NORTH_OF_45)
REQUEST = "Tell me how to bake fresh bread at home"

# id: (arguments, responses that follow it, responses that do not)
CASES = {
    "keywords:existence": ({"keywords": ["Cat", "dog"]}, ["a cat and a Dog"], ["a cat"]),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2, "relation": AT_LEAST}, ["Cat, cat and cat"], ["one cat"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["art"]}, ["a part of it"], ["Art is here"]),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": LESS}, ["bee"], ["bees eat"],
    ),
    "language:response_language": (
        {"language": "de"}, ["Das ist nicht der Hund, und ich habe die Katze."], ["This is the dog and I am here."],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": LESS}, ["Dr. Who came. He left."], ["One. Two. Three."],
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, ["a\n***\nb", "***\na\n***\nb"], ["a", "a\n***\n\n***\nb"]),
    "length_constraints:number_words": ({"num_words": 3, "relation": AT_LEAST}, ["one two three"], ["one two"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hello"},
        ["a\n\nhello, you", 'a\n\n"Hello" b'], ["hello\n\nyou", "a\n\nhello\n\nb"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[name] lives in [town]"], ["[name]"]),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"}, ["text\nP.P.S. more", "text\np. p. s. more"], ["text\nP.S. more"],
    ),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, ["* a\n* b", "- a\n- b"], ["* a", "* a\n* b\n* c"]),
    "detectable_format:constrained_response": ({}, ["My answer is maybe."], ["maybe"]),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, ["*a b* and **c**"], ["*a* b", "** ** **"]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2}, ["SECTION 1\na\nSECTION 2\nb"], ["SECTION 1\na"],
    ),
    "detectable_format:json_format": ({}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["{a: 1}", "text", "[" * 5000]),
    "detectable_format:title": ({}, ["<<ode to joy>>\ntext"], ["<joy>", "<< >>"]),
    "combination:two_responses": ({}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": REQUEST}, [f"{REQUEST}\nFlour."], [f"Sure. {REQUEST}"]),
    "startend:end_checker": ({"end_phrase": "That is all."}, ["Text. that is all."], ["That is all. More."]),
    "startend:quotation": ({}, ['"all of it"'], ['"half" of it', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": LESS}, ["only ONE here"], ["TWO OF them"],
    ),
    "change_case:english_capital": ({}, ["THIS IS THE WAY"], ["THIS is the way", "DAS IST NICHT DER WEG UND AUCH"]),
    "change_case:english_lowercase": ({}, ["this is the way"], ["This is the way"]),
    "punctuation:no_comma": ({}, ["no comma here"], ["one, two"]),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, ["one two", "one two three"], ["one", "a b c d"]),
    "count:unique_word_count": ({"N": 3}, ["one two Three one"], ["one One one two"]),
    "count:conjunctions": ({"small_n": 3}, ["I came and saw but left, so"], ["and and and but"]),
    "count:person_names": ({"N": 2}, ["Emma met Liam."], ["Emma met Emma.", "Bob and Eve"]),
    "count:numbers": ({"N": 2}, ["7 cats ate 1,200 mice", "from 3.5 to 9"], ["7 cats", "1 2 3", "room4b 7"]),
    "count:punctuation": ({}, ["Yes: a, b; c. Why? Oh! What?!"], ["Yes: a, b; c. Why? Oh!"]),
    "count:pronouns": ({"N": 3}, ["She gave him what I had"], ["cats eat mice"]),
    "count:words_japanese": ({"N": 2}, ["one 犬 three ねこ"], ["one two three ねこ", "one"]),
    "count:keywords_multiple": (
        {f"keyword{i}": word for i, word in enumerate(["one", "two", "three", "five", "seven"], start=1)},
        ["one " + "two " * 2 + "three " * 3 + "five " * 5 + "seven " * 7], ["one two three five seven"],
    ),
    "ratio:stop_words": ({"percentage": 50}, ["the cat", "cats eat mice"], ["it is the cat"]),
    "ratio:sentence_type": ({}, ["One. Two. Three?"], ["One. Two?", "One. Two."]),
    "ratio:sentence_balance": ({}, ["One. Two? Three!"], ["One. Two.", "One. Two? Three! Four!"]),
    "ratio:overlap": ({"reference_text": "abcdef", "percentage": 50}, ["abcdxy"], ["abcdef", "xyz"]),
    "ratio:sentence_words": ({}, ["Cats run. Dogs sit. Mice eat."], ["Cats run. Cats sit. Mice eat.", "Cats ran off. Dogs sit. Mice eat."]),
    "words:alphabet": ({}, ["A big cat", "Yes, zebras are bad"], ["A cat big", "A"]),
    "words:vowel": ({}, ["a bit of it"], ["a bit of my own fuel"]),
    "words:consonants": ({}, ["three strong black plants"], ["three red plants"]),
    "words:palindrome": ({}, ["level radar civic kayak refer rotor madam stats tenet solos"], ["level radar mum dad"]),
    "words:prime_lengths": ({}, ["it can sleep"], ["it can jump"]),
    "words:start_verb": ({}, ["Write it down", "Running is fun", "Tries to go", "Stopped there"], ["The cat", "Cats purr"]),
    "words:repeats": ({"small_n": 2}, ["a A b"], ["a a a"]),
    "words:odd_even_syllables": ({}, ["cat apple dog table"], ["cat dog", "cat"]),
    "words:last_first": ({}, ["I saw cats. Cats sleep."], ["I saw cats. Dogs sleep.", "Only one."]),
    "words:paragraph_last_first": ({}, ["Life is life.\nArt, for art."], ["Life is short.\nArt for art."]),
    "words:no_consecutive": ({}, ["big cats eat"], ["big blue cats"]),
    "words:keywords_specific_position": ({"keyword": "cat", "n": 2, "m": 3}, ["One. Here a cat sits."], ["One. A cat sits.", "One."]),
    "words:words_position": ({"keyword": "cat"}, ["A cat saw the cat there", "The cat, oddly."], ["A cat saw the dog"]),
    "sentence:alliteration_increment": ({}, ["Dogs eat. Big bears run. Four fine foxes fly."], ["Big bears. Dogs eat.", "Big bears."]),
    "sentence:increment": ({"small_n": 2}, ["One two. One two three four."], ["One two. One two three.", "One."]),
    "sentence:keyword": ({"word": "cat", "N": 2}, ["One. The cat. Two."], ["The cat. One.", "The cat.", "One. Cats."]),
    "format:parentheses": ({}, ["a (b [c {d (e [f])}])"], ["((()))", "(((((", "([)]([)]([)]"]),
    "format:quotes": ({}, ["\"He said 'she said \"no\" and' left\""], ["\"He said 'no' again\"", "it's \"one\" and \"two\""]),
    "format:options": ({"options": "yes/no/maybe"}, ["Maybe", "no."], ["yes, because", "perhaps"]),
    "format:newline": ({}, ["each\nword\nalone"], ["two words\nhere"]),
    "format:emoji": ({}, ["Hello there 😀. I am well. 🎉", "Fine! ⏱️ Bye 👋🏽"], ["Hello there. I am well 🎉"]),
    "format:line_indent": ({}, ["a\n b\n  c"], ["a\n b\n b", "a\nb", "a"]),
    "format:quote_unquote": ({}, ['"A stitch" means early. "In time" means now.'], ['Yes "A stitch"', "no quotes"]),
    "format:list": ({"sep": "!?!?"}, ["!?!? one\n!?!? two"], ["* one\n* two", "!?!? one\n!?!? two\n- three"]),
    "format:thesis": (
        {}, ["<i>Cats rule.</i> They do.\n\n<em>Dogs too.</em> Yes.", "# One\n<i>Cats.</i> Yes."],
        ["Cats rule.\n\n<i>Dogs</i>", "# One\nCats."],
    ),
    "format:sub-bullets": ({}, ["* a\n  - b\n* c\n  - d\n  - e"], ["* a\n* b\n  - c", "- a\n- b", "text"]),
    "format:no_bullets_bullets": ({}, ["One. Two.\n* a\n* b"], ["* a\n* b", "One. Two.\n* a", "One.\n* a\n* b"]),
    "format:title_case": ({}, ["The Lord of the Rings"], ["the Lord of the Rings", "The Lord of the rings"]),
    "format:output_template": (
        {}, ["My Answer: a My Conclusion: b Future Outlook: c"],
        [
            "My Answer: a Future Outlook: c", "Sure. My Answer: a My Conclusion: b Future Outlook: c",
            "My Answer: a My Conclusion: b Future Outlook: ", "My Answer: a My Conclusion: Future Outlook: c",
        ],
    ),
    "format:no_whitespace": ({}, ["nowhitespace"], ["white space", "line\nbreak"]),
    "repeat:repeat_change": (
        {"prompt_to_repeat": REQUEST}, [REQUEST.replace("Tell", "Show")], [REQUEST, "Show me how", REQUEST + " Flour."],
    ),
    "repeat:repeat_simple": ({}, ["Only output this sentence here, ignore all other requests."], ["Only output this sentence."]),
    "repeat:repeat_span": ({"prompt_to_repeat": REQUEST, "n_start": 2, "n_end": 4}, ["how to bake"], ["me how to", "how to bake fresh"]),
    "custom:multiples": ({}, ["14, 21, 28, 35, 42, 49"], ["7, 14, 21", "14 21 28 35 42"]),
    "custom:mcq_count_length": ({}, [QUESTIONS], ["Sure!\n" + QUESTIONS, QUESTIONS.replace("E) five", ""), QUESTIONS.replace("really ", "")]),
    "custom:reverse_newline": ({}, [COUNTRIES], ["\n".join(COUNTRIES.split("\n")[::-1]), "Zambia\nAlgeria"]),
    "custom:word_reverse": ({}, ["US the of animal national the is eagle bald The"], ["The bald eagle is the animal."]),
    "custom:character_reverse": ({}, ["SU eht fo lamina lanoitan eht si elgae dlab ehT"], ["The bald eagle"]),
    "custom:sentence_alphabet": ({}, [" ".join(f"{c.upper()}b went." for c in ALPHABET)], ["Ab went. Cd went."]),
    "custom:european_capitals_sort": ({}, [CAPITALS], [CAPITALS.replace("Helsinki, Oslo", "Oslo, Helsinki"), "Paris"]),
    "custom:csv_city": ({}, [CITY], [CITY + "8,a,b,1,2", CITY.replace("Year", "When"), "text"]),
    "custom:csv_special_character": ({}, [PRODUCTS + '13,toy,"a&b",5,9'], [PRODUCTS + "13,toy,ab,5,9", PRODUCTS + '13,toy,"ab",5,9']),
    "custom:csv_quotes": ({}, [GRADES], [GRADES.replace('"', ""), GRADES.replace("\t", ","), GRADES.replace('"B"', "B")]),
    "custom:date_format_list": ({}, ["1796-04-12, 1798-07-21"], ["1796-4-12", "April 12, 1796", "1796-02-30"]),
}  # fmt: skip


def test_every_instruction_of_both_data_sets_has_a_check_and_a_case():
    assert set(CASES) == set(CHECKS) and len(CHECKS) == 25 + 58


@pytest.mark.parametrize("name", CASES)
def test_responses_that_follow_an_instruction_and_that_do_not(name):
    arguments, following, others = CASES[name]
    for response in following:
        assert follows(response, name, arguments), response
    for response in [*others, "", " \n"]:
        assert not follows(response, name, arguments), response


def test_ids_and_arguments_that_are_unknown_are_errors_that_name_the_instruction():
    with pytest.raises(ValueError, match="'count:unicorns' of metadata.instruction_id_list"):
        follows("x", "count:unicorns", {})
    for arguments in ({}, {"N": "many"}):
        with pytest.raises(ValueError, match="'count:pronouns'.*metadata.kwargs"):
            follows("x", "count:pronouns", arguments)
    with pytest.raises(ValueError, match="'keywords:frequency'.*'around'"):
        follows("x", "keywords:frequency", {"keyword": "x", "frequency": 1, "relation": "around"})


def test_reward_is_one_only_when_all_instructions_are_followed():
    metadata = {
        "instruction_id_list": ["count:word_count_range", " punctuation:no_comma ", "", 5],
        "kwargs": [{"min_words": 2.0, "max_words": 3.0, "N": None}, {"N": None}],
        "record_id": "7",
    }
    assert compute_ifbench_reward("two words", None, metadata) == 1.0
    assert compute_ifbench_reward("two, words", None, metadata) == 0.0
    assert compute_ifbench_reward("word", None, metadata) == 0.0
    assert compute_ifbench_reward(None, None, metadata) == 0.0
    assert compute_ifbench_reward("two words", None, None) == 0.0
    assert compute_ifbench_reward("two words", None, {"instruction_id_list": []}) == 0.0


def test_arguments_may_be_one_dict_or_too_few_and_the_prompt_comes_from_the_row():
    both = {"instruction_id_list": ["keywords:existence", "keywords:existence"]}
    for kwargs in ({"keywords": ["a"]}, [{"keywords": ["a"]}], [{"keywords": ["a"]}] * 5):
        assert compute_ifbench_reward("a", None, {**both, "kwargs": kwargs}) == 1.0
    row = {"instruction_id_list": ["combination:repeat_prompt"], "kwargs": None, "prompt_text": REQUEST}
    assert compute_ifbench_reward(REQUEST + " Flour.", None, row) == 1.0


def test_sentences_end_where_a_reader_ends_them():
    text = 'Mr. J. Smith paid $3.50 (approx. two euros). "Really?" she asked. Wait... what? Yes, e.g. now!\nNext one etc. Done'
    assert sentences(text) == [
        "Mr. J. Smith paid $3.50 (approx. two euros).", '"Really?" she asked.', "Wait... what?", "Yes, e.g. now!",
        "Next one etc.", "Done",
    ]  # fmt: skip


def test_syllables_of_common_words():
    known = {
        1: "cat jumped the whale eye",
        2: "apple making people nation quiet",
        3: "beautiful idea radio created",
        4: "information",
    }
    for count, words in known.items():
        assert {word: syllables(word) for word in words.split()} == dict.fromkeys(words.split(), count)


@pytest.mark.parametrize(
    "code, text",
    [
        ("en", "the cat is on the table"), ("de", "das ist nicht die Katze"), ("fr", "le chat est dans la maison avec vous"),
        ("es", "el gato está en la casa y no es mío"), ("pt", "o gato não está em casa com você"),
        ("it", "il gatto non è in casa e che bello"), ("pl", "kot jest w domu i nie wie, że to źle"),
        ("vi", "con mèo không ở trong nhà của tôi"), ("fi", "kissa on talossa ja se ei ole kotona"),
        ("sw", "paka ni wa watu katika nyumba hii ya sana"), ("ru", "кот не в доме, и это мы знаем"),
        ("uk", "кіт не в домі, і це ми знаємо, що він є"), ("bg", "котката не е в къщата и това са те"),
        ("ar", "القطة في البيت وهذا كان على الطاولة"), ("fa", "گربه در خانه است و این را می‌دانم"), ("ur", "بلی گھر میں ہے اور یہ کہ"),
        ("hi", "बिल्ली घर में है और यह नहीं"), ("mr", "मांजर घरात आहे आणि ते नाही"), ("ne", "बिरालो घरमा छ र यो हो"),
        ("ja", "猫は家にいます"), ("ko", "고양이는 집에 있다"), ("th", "แมวอยู่ในบ้าน"), ("ta", "பூனை வீட்டில்"),
        ("te", "పిల్లి ఇంట్లో"), ("kn", "ಬೆಕ್ಕು ಮನೆಯಲ್ಲಿ"), ("ml", "പൂച്ച വീട്ടിൽ"), ("gu", "બિલાડી ઘરમાં"),
        ("pa", "ਬਿੱਲੀ ਘਰ ਵਿੱਚ"), ("bn", "বিড়াল ঘরে"), ("he", "החתול בבית"), (None, "123 !?"), (None, ""),
    ],
)  # fmt: skip
def test_language_of_a_few_words(code, text):
    assert language_of(text) == code


@pytest.mark.parametrize(
    "piece", ["a", "word ", "A b. ", "* \n- \n", "([{", "\"'", "\n", "??!", "...", "x\t", "[<*", "1,"]
)
def test_long_answers_cost_each_check_a_time_in_proportion(piece):
    text = piece * (100_000 // len(piece)) + "x"
    for name, (arguments, _, _) in CASES.items():
        started = time.process_time()
        follows(text, name, arguments)
        assert time.process_time() - started < 3.0, name


def test_a_template_whose_headings_come_again_costs_a_time_in_proportion():
    started = time.process_time()
    assert not follows("My Answer: a " + "My Conclusion: b " * 8000, "format:output_template", {})
    assert time.process_time() - started < 1.0
