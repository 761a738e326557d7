"""English names of the languages that speech is written down in, as OpenAI's API has them."""

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    "af": "afrikaans",
    "am": "amharic",
    "ar": "arabic",
    "as": "assamese",
    "az": "azerbaijani",
    "ba": "bashkir",
    "be": "belarusian",
    "bg": "bulgarian",
    "bn": "bengali",
    "bo": "tibetan",
    "br": "breton",
    "bs": "bosnian",
    "ca": "catalan",
    "cs": "czech",
    "cy": "welsh",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": "english",
    "es": "spanish",
    "et": "estonian",
    "eu": "basque",
    "fa": "persian",
    "fi": "finnish",
    "fo": "faroese",
    "fr": "french",
    "gl": "galician",
    "gu": "gujarati",
    "ha": "hausa",
    "haw": "hawaiian",
    "he": "hebrew",
    "hi": "hindi",
    "hr": "croatian",
    "ht": "haitian creole",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "is": "icelandic",
    "it": "italian",
    "ja": "japanese",
    "jw": "javanese",
    "ka": "georgian",
    "kk": "kazakh",
    "km": "khmer",
    "kn": "kannada",
    "ko": "korean",
    "la": "latin",
    "lb": "luxembourgish",
    "ln": "lingala",
    "lo": "lao",
    "lt": "lithuanian",
    "lv": "latvian",
    "mg": "malagasy",
    "mi": "maori",
    "mk": "macedonian",
    "ml": "malayalam",
    "mn": "mongolian",
    "mr": "marathi",
    "ms": "malay",
    "mt": "maltese",
    "my": "myanmar",
    "ne": "nepali",
    "nl": "dutch",
    "nn": "nynorsk",
    "no": "norwegian",
    "oc": "occitan",
    "pa": "punjabi",
    "pl": "polish",
    "ps": "pashto",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sa": "sanskrit",
    "sd": "sindhi",
    "si": "sinhala",
    "sk": "slovak",
    "sl": "slovenian",
    "sn": "shona",
    "so": "somali",
    "sq": "albanian",
    "sr": "serbian",
    "su": "sundanese",
    "sv": "swedish",
    "sw": "swahili",
    "ta": "tamil",
    "te": "telugu",
    "tg": "tajik",
    "th": "thai",
    "tk": "turkmen",
    "tl": "tagalog",
    "tr": "turkish",
    "tt": "tatar",
    "uk": "ukrainian",
    "ur": "urdu",
    "uz": "uzbek",
    "vi": "vietnamese",
    "yi": "yiddish",
    "yo": "yoruba",
    "yue": "cantonese",
    "zh": "chinese",
}
_CODES: Mapping[str, str] = {name: code for code, name in _NAMES.items()} | {
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "moldavian": "ro",
    "moldovan": "ro",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}


def language_name(code: str) -> str:
    """Return a language's English name in lower case; the code where the name is not known.

    >>> language_name("de")
    'german'
    """
    return _NAMES.get(code, code)


def language_code(given: str) -> str:
    """Return the code of a language that is given by its English name or by its code, in any case.

    What is neither is returned in lower case.

    >>> language_code("German"), language_code("de")
    ('de', 'de')
    """
    text = given.strip().lower()
    return _CODES.get(text, text)
