"""Patterns and bounds of the values of `format` in JSON schemas. Each pattern's values parse with
Python's parser of the format (datetime, ipaddress, uuid, email-validator, urllib), which
tests/unit/engine/grammar/test_formats.py checks on samples.

Sources: RFC 3339 (date, time, appendix A for durations), RFC 5321, RFC 1123, RFC 4291, RFC 4122,
RFC 3986, RFC 6901. A format that no standard defines is an annotation, as JSON Schema says. Values;
any thread.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"

_CLOCK = "T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
_DAYS = "[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,6}D)?)?|[0-9]{1,4}M(?:[0-9]{1,6}D)?|[0-9]{1,6}D"
_DURATION = f"P(?:(?:{_DAYS})(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,5}}W)"

# No label has two hyphens in a row: the ones that do stand for other alphabets ("xn--"). Names are
# not counted in emails and addresses: with a count a mask of 128,000 tokens takes 1.5 ms, without
# 0.1 ms, since all tokens of letters and digits can be told at once.
_SHORT_LABEL = "[a-zA-Z0-9]{1,32}(?:-[a-zA-Z0-9]{1,24})?"
_HOSTNAME = rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{0,3}}"
_LABEL = "[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)*"
_NAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[a-zA-Z][a-zA-Z]+"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{1,7}}:",
        *(f"(?:{_H}:){{1,{7 - after}}}(?::{_H}){{1,{after}}}" for after in range(1, 7)),
        f":(?::{_H}){{1,7}}",
        "::",
    ]
)
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

_PATH_CHARACTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_AUTHORITY = rf"//(?:{_NAME}|{_IPV4})(?::[1-9][0-9]{{0,3}})?"
_TAIL = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_PATH = f"(?:/{_PATH_CHARACTER}*)*"
_ROOTLESS = f"{_PATH_CHARACTER}+{_PATH}"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{_AUTHORITY}{_PATH}|{_ROOTLESS}){_TAIL}"
_POINTER = r'(?:/(?:[^~/"\\\x00-\x1f]|~[01])*)*'

# Regular expressions that every dialect reads: literals, escapes, classes, one level of groups.
_ATOM_OF_REGEX = (
    r"(?:[A-Za-z0-9 _/:;,@#%&=~<>!-]|\\[dwsDWS.+*?|()\[\]{}^$/-]"
    r"|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_.])+\]|\.)(?:[*+?]|\{[0-9]{1,2}\})?"
)
_GROUP_OF_REGEX = rf"\((?:\?:)?(?:{_ATOM_OF_REGEX})+(?:\|(?:{_ATOM_OF_REGEX})+)*\)[*+?]?"
_REGEX = rf"\^?(?:{_ATOM_OF_REGEX}|{_GROUP_OF_REGEX})*\$?"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "datetime": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ip": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "uuid": _UUID,
    **{f"uuid{version}": _UUID for version in range(1, 9)},
    "uri": _URI,
    "url": _URI,
    "iri": _URI,
    "uri-reference": rf"{_URI}|/{_PATH_CHARACTER}*{_PATH}{_TAIL}",
    "iri-reference": rf"{_URI}|/{_PATH_CHARACTER}*{_PATH}{_TAIL}",
    "uri-template": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]{{1,4}})(?:#|{_POINTER})",
    "color": "#[0-9a-fA-F]{6}",
    "regex": _REGEX,
}
"""Patterns, without anchors, that match the whole string, by format."""

BOUNDS: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
    "int64": (-(1 << 53), 1 << 53),
    "uint64": (0, 1 << 53),
}
"""Bounds of integers, by format. 64-bit bounds end where float64 cannot represent every integer, as
JSON readers use it."""
