"""Which language a text is in: by script, then by letters and by function words that only one language has.

Covers the languages that the instructions name; anything else is None. A text must show its language: a few words are enough.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_SCRIPTS = {
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "THAI": "th", "TAMIL": "ta", "TELUGU": "te", "KANNADA": "kn",
    "MALAYALAM": "ml", "GUJARATI": "gu", "GURMUKHI": "pa", "BENGALI": "bn", "HEBREW": "he", "GREEK": "el",
    "ARABIC": "arabic", "CYRILLIC": "cyrillic", "DEVANAGARI": "devanagari", "LATIN": "latin", "CJK": "zh",
}  # fmt: skip

_WORDS = {
    "latin": {
        "en": "the and of to is in that it for you with are this was have not be on as at by an from or your will can i",
        "de": "der die das und ist nicht ich ein eine zu mit den von für auf sich im dem es auch als sie wir",
        "fr": "le la les des et est une un pour que qui dans ce il je ne pas sur au avec vous nous plus du",
        "es": "el la los las de y que es en un una por con para no se del lo su como más pero",
        "pt": "o a os as de e que é em um uma por com para não se do da no na como mais mas você",
        "it": "il lo la gli le di e che è in un una per con non si del della sono come più ma",
        "pl": "i w nie na to się z że jest do jak co o ale po tak od za czy",
        "vi": "và của là có không được cho một những trong với này các người đã để",
        "fi": "ja on ei se että hän mutta oli ovat niin kun myös kuin tai ovat olla tämä sen",
        "sw": "na ya wa ni kwa katika hii la za cha kama si yake hiyo huyo sana watu",
    },
    "cyrillic": {
        "ru": "и в не на что он с как это по но они мы для от из так ы э",
        "uk": "і в не на що він з як це по але вони ми для від із та є",
        "bg": "и в не на че той с как това по но те ние за от из да се са",
    },
    "arabic": {
        "ar": "في من على إلى أن هذا التي الذي كان هذه مع عن لا ما",
        "fa": "و در به از که این است را با برای آن می یک های شود",
        "ur": "کے میں ہے کی اور سے کا کو نے ہیں پر یہ کہ کر",
    },
    "devanagari": {
        "hi": "है के में की और से का को हैं पर यह नहीं एक ने",
        "mr": "आहे आणि या च्या मध्ये ते हे आहेत नाही एक होते साठी",
        "ne": "छ र को मा हो यो छन् गर्न लाई पनि एक भएको",
    },
}
_LETTERS = {
    "cyrillic": {"ru": "ыэё", "uk": "іїєґ", "bg": "ъ"},
    "arabic": {"fa": "پچژگ", "ur": "ٹڈڑےں", "ar": "ةأإ"},
    "latin": {"de": "äöüß", "fr": "çœèê", "es": "ñ¿¡", "pt": "ãõ", "pl": "ąęłśżźć", "vi": "ơưđạảấầậếềệ", "fi": "äö"},
    "devanagari": {"mr": "ळ"},
}
_VOTES = {family: {code: set(words.split()) for code, words in table.items()} for family, table in _WORDS.items()}
MAX_CHARS = 20_000
"""The language of a longer text is read from its beginning."""


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code, or None when nothing tells.

    >>> language_of("Der Hund ist nicht im Haus"), language_of("これは犬です"), language_of("42")
    ('de', 'ja', None)
    """
    text = text[:MAX_CHARS].lower()
    scripts = Counter(filter(None, (_script(c) for c in text)))
    if not scripts:
        return None
    script = scripts.most_common(1)[0][0]
    if script == "zh" and scripts["ja"]:
        return "ja"
    if script not in _VOTES:
        return script
    votes: Counter[str] = Counter()
    found = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text) if script == "latin" else text.split()
    counts = Counter(word.strip(".,!?;:()\"'«»،؟।") for word in found)
    for code, known in _VOTES[script].items():
        votes[code] = sum(counts[word] for word in known)
    for code, letters in _LETTERS[script].items():
        votes[code] += sum(text.count(letter) for letter in letters)
    code, count = votes.most_common(1)[0]
    return code if count else None


def _script(character: str) -> str | None:
    if not character.isalpha():
        return None
    if character < "\u0250":
        return "latin"
    return _SCRIPTS.get(unicodedata.name(character, "").split(" ")[0].split("-")[0])
