"""Hostile grammars for tests of structured-output limits.

Most are valid, some malformed on purpose. An engine must refuse each one or serve it within its
time and memory limits. It must never crash, hang or grow without bound.
"""

import json
from collections.abc import Iterable, Iterator

Grammar = tuple[str, str, str]
Named = Iterator[tuple[str, str]]
KINDS = ("regex", "json_schema", "lark", "gbnf", "choice")
STRING = {"type": "string"}
INTEGER = {"type": "integer"}

# Short patterns, separated by white space: ambiguous, unsupported and malformed ones.
PLAIN_REGEXES = r"""
(a*)*b (a|aa)+$ ^(a|a?)+$ (.*)*x (a|b|ab)*c ((a+)+)+d (x+x+)+y (?=a)b (?<!a)b (a)\1 \b.* \p{Foo}
[z-a] a{2,1} (?P<x>a)(?P=x) \x{110000} a** + {1} [[:alpha:]&&[^a]] (?s:.){0,9999} [\w--\d] (?:)
$^ (?R)*\Ka [^] | \ \x \ud800 (?-u:\xff) (?s-u:.)* (?>a*)a a*+ [a-z&&[^a-z]]x (|a|)* (a?){0,999}b
"""


def _nest(core: str, suffix: str, levels: int) -> str:
    return "(" * levels + core + f"){suffix}" * levels


def _obj(properties: dict[str, object], required: Iterable[str] = (), **more: object) -> object:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _strings(count: int, length: int) -> list[str]:
    pad = "abcdefghij" * (length // 10 + 1)
    return [f"{i * 2654435761 % 2**32:08x}{pad}"[:length] for i in range(count)]


def _bits(width: int) -> str:
    """Return a pattern whose deterministic automaton has about 2**width states."""
    return f"(.*a.{{{width}}}|.*b.{{{width}}}c)"


def _regexes() -> Named:
    for levels in (2, 3, 4, 6, 10, 20):
        for suffix in ("{99}", "{0,100}", "{1,200}", "{9,}", "*", "+", "?", "{0,9}", "{2}"):
            yield f"nest_{levels}_{suffix}", _nest("a", suffix, levels)
        yield f"nest_class_{levels}", _nest("[a-z0-9 ]", "{0,50}", levels)
        yield f"nest_dot_{levels}", _nest(".", "{1,40}", levels)
        yield f"nest_pair_{levels}", _nest("a|b[^c]", "{3,30}", levels)
    for count in (100, 1_000, 10_000, 100_000, 1_000_000, 10**9, 2**32 - 1, 2**32, 10**20):
        yield f"count_a_{count}", f"a{{{count}}}"
        yield f"count_upto_{count}", f"[a-z]{{0,{count}}}"
        yield f"count_from_{count}", f"(ab?){{{count},}}x"
        yield f"count_dot_{count}", f".{{1,{count}}}"
        yield f"count_empty_{count}", f"(){{{count}}}"
    for count in (10, 50, 90, 200, 900):
        yield f"negated_alt_{count}", "|".join(f"[^{c}]{{0,{count}}}{c}" for c in "abcdefghij")
        yield f"bits_{count}", _bits(count)
        yield f"bits_loop_{count}", f"({_bits(count)})*x"
        yield f"dots_{count}", f"(.{{1,{count}}}x){{1,{count}}}"
        yield f"two_dots_{count}", f".{{0,{count}}}a.{{0,{count}}}b.{{0,{count}}}c.{{0,{count}}}"
        yield f"optional_{count}", "a?" * count + "a" * count
        yield f"star_chain_{count}", ".*a" * count
        yield f"class_chain_{count}", "".join(f"[a-{c}]{{0,{count}}}" for c in "zyxwvuts")
        yield f"unicode_{count}", rf"\p{{L}}{{1,{count}}}\P{{Lu}}{{1,{count}}}[^\x00-\x{{ffff}}]*"
        yield f"words_{count}", rf"(\w{{1,{count}}}[ ,.]){{1,{count}}}"
        yield f"forced_{count}", "ab" * count + "c*"
        yield f"fold_{count}", f"(?i)(straße|ﬁ|K|[à-þ]{{0,{count}}}){{0,{count}}}"
        yield f"alt_counts_{count}", "|".join(f"(a{{{i}}})*" for i in range(2, count // 5 + 3))
        yield f"prefixes_{count}", "|".join("a" * i + "b" for i in range(count))
        yield f"suffixes_{count}", "(" + "|".join(f".*x{i}" for i in range(count)) + ")"
        yield (
            f"overlap_{count}",
            "(" + "|".join(f"[a-z]{{{i},{i * 2}}}" for i in range(count)) + ")",
        )
        yield f"nothing_{count}", rf"[^\x00-\x{{10ffff}}]a{{{count}}}"
    for depth in (10, 100, 200, 1_000, 5_000, 20_000, 100_000):
        yield f"parens_{depth}", _nest("a", "", depth)
        yield f"open_parens_{depth}", "(" * depth
        yield f"parens_star_{depth}", _nest("a", "*", depth)
        yield f"parens_opt_{depth}", "(a" * depth + ")?" * depth
        yield f"class_nest_{depth}", "[a" * depth + "]" * depth
        yield f"stars_{depth}", "a" + "*" * depth
    for size in (1_000, 30_000, 300_000, 1_000_000, 10_000_000):
        yield f"literal_{size}", "a" * size
        yield f"alternatives_{size}", "|".join(_strings(size // 10, 9))
    for size in (1_000, 30_000, 300_000):
        yield f"dots_text_{size}", "." * size
        yield f"stars_text_{size}", "a*" * (size // 2)
        yield f"classes_text_{size}", "[a-z]?" * (size // 6)
        yield f"unicode_text_{size}", r"\p{L}" * (size // 5)
        yield f"counted_text_{size}", "(.{1,9}|b)" * (size // 10)
    yield from ((f"plain_{i}", text) for i, text in enumerate(PLAIN_REGEXES.split()))
    yield from (("empty", ""), ("null", "\0*"), ("newlines", "\n" * 5000))


MALFORMED_SCHEMAS = r"""
{"a": [] true "x" 1e999 {"$ref":1} {"$ref":"http://x/y"} {"$ref":"#/none"}
{"const":"\ud800"} {"type":9} {"pattern":"(","type":"string"} {"pattern":"(?=a)","type":"string"}
{"enum":[]} {"type":[]} {"not":{}}
"""


def _chain(kind: str, count: int, leaf: object, depth: int = 0) -> object:
    """Return `count` definitions that each name the next one twice under `kind`."""
    refs: list[dict[str, object]] = [{"$ref": f"#/$defs/d{i}"} for i in range(count + 1)]
    for _ in range(depth):
        refs = [{kind: [ref]} for ref in refs]
    defs: dict[str, object] = {f"d{i}": {kind: [refs[i + 1]] * 2} for i in range(count)}
    return {"$defs": {**defs, f"d{count}": leaf}, **refs[0]}


def _product(outer: str, inner: str, width: int, depth: int) -> object:
    """Return `depth` members of `outer`, each a choice of `width` different objects."""
    ids = range(width)
    keys = ([f"p{d}_{w}" for w in ids] for d in range(depth))
    return {outer: [{inner: [_obj({key: {"enum": [1, key]}}) for key in row]} for row in keys]}


def _nested_text(opening: str, core: str, closing: str, depth: int) -> str:
    return opening * depth + core + closing * depth


def _schemas() -> Iterator[tuple[str, object]]:
    ref: object = {"$ref": "#"}
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    yield "self_ref", ref
    yield "ref_cycle", {"$defs": loop, "$ref": "#/$defs/a"}
    for kind in ("allOf", "anyOf", "oneOf"):
        yield f"self_{kind}", {kind: [ref, {"type": "object"}]}
        defs: dict[str, object] = {"a": {kind: [ref, ref]}}
        yield f"self_{kind}_two", {"$defs": defs, kind: [{"$ref": "#/$defs/a"}]}
        leaf = _obj({"a": INTEGER, "b": STRING})
        for count in (5, 12, 18, 30, 200, 2_000):
            yield f"chain_{kind}_{count}", _chain(kind, count, {"type": "string", "maxLength": 9})
            yield f"chain_obj_{kind}_{count}", _chain(kind, count, leaf)
        yield f"chain_deep_{kind}", _chain(kind, 300, STRING, 10)
        for inner in ("anyOf", "oneOf"):
            for width, depth in ((2, 4), (2, 10), (2, 16), (3, 12), (10, 5), (30, 4)):
                label = f"product_{kind}_{inner}_{width}_{depth}"
                yield label, _product(kind, inner, width, depth)
    for items in (ref, {"anyOf": [ref, {"type": "null"}]}):
        label = "loop" if items is ref else "maybe"
        yield f"{label}_required", _obj({"a": items}, ["a"])
        yield f"{label}_items", {"type": "array", "items": items, "minItems": 1}
        yield f"{label}_prefix", {"type": "array", "prefixItems": [items] * 9, "minItems": 9}
        yield f"{label}_extra", {"type": "object", "additionalProperties": items}
        yield f"{label}_wide", _obj({f"k{i}": items for i in range(500)})
        yield f"{label}_all", {"allOf": [_obj({"a": items}), _obj({"a": items, "b": items})]}
        yield f"{label}_patterns", {"patternProperties": {"^a": items, "a$": items, ".": items}}
    pair = {key: _obj({"b": loop[key]}, ["b"]) for key in ("a", "b")}
    yield "mutual_required", {"$defs": pair, "$ref": "#/$defs/a"}
    for depth in (10, 60, 120, 130, 1_000, 20_000, 100_000):
        yield f"deep_items_{depth}", _nested_text('{"items":', "{}", "}", depth)
        yield f"deep_props_{depth}", _nested_text('{"properties":{"a":', "{}", "}}", depth)
        yield f"deep_any_{depth}", _nested_text('{"anyOf":[', "{}", "]}", depth)
        yield f"deep_all_{depth}", _nested_text('{"allOf":[', "{}", "]}", depth)
        yield f"deep_not_{depth}", _nested_text('{"not":', "{}", "}", depth)
        yield f"deep_const_{depth}", '{"const":' + _nested_text("[", "", "]", depth) + "}"
    for count in (100, 1_000, 10_000, 100_000):
        yield f"enum_{count}", {"enum": _strings(count, 12)}
        yield f"enum_int_{count}", {"enum": list(range(count))}
        yield f"optional_{count}", _obj({f"key{i}": INTEGER for i in range(count)})
    for count in (100, 1_000, 5_000):
        keys = [f"key{i}" for i in range(count)]
        yield f"required_{count}", _obj(dict.fromkeys(keys, STRING), keys)
        yield f"undeclared_{count}", {"type": "object", "required": keys}
        strict = _obj(dict.fromkeys(keys, True), additionalProperties=False)
        yield f"optional_strict_{count}", strict
        yield f"any_const_{count}", {"anyOf": [{"const": key} for key in keys]}
        yield f"one_obj_{count}", {"oneOf": [_obj({"t": {"const": k}}, ["t"]) for k in keys]}
        yield f"pattern_keys_{count}", {"patternProperties": {f"^{k}.*": INTEGER for k in keys}}
        yield f"enum_keys_{count}", {"propertyNames": {"enum": keys}, "type": "object"}
    for length in (10_000, 100_000, 1_000_000, 10_000_000):
        yield f"long_const_{length}", {"const": "x" * length}
        if length <= 1_000_000:
            yield f"long_key_{length}", _obj({"k" * length: STRING}, ["k" * length])
            yield f"long_pattern_{length}", {"type": "string", "pattern": "[ab]" * (length // 4)}
    yield "big_enum_text", {"enum": _strings(25_000, 390)}
    yield "big_description", {"type": "string", "description": "d" * 9_900_000}
    yield "big_properties", _obj({f"p{i}": {"type": "string"} for i in range(300_000)})
    for bound in (100, 2_000, 10_000, 100_000, 10**6, 10**9, 2**63, 10**30):
        yield f"min_items_{bound}", {"type": "array", "items": INTEGER, "minItems": bound}
        yield f"max_items_{bound}", {"type": "array", "items": INTEGER, "maxItems": bound}
        yield f"max_any_items_{bound}", {"type": "array", "maxItems": bound}
        yield f"min_length_{bound}", {"type": "string", "minLength": bound}
        yield f"max_length_{bound}", {"type": "string", "maxLength": bound}
        yield f"exact_length_{bound}", {"type": "string", "minLength": bound, "maxLength": bound}
        yield f"min_props_{bound}", {"type": "object", "minProperties": bound}
        yield f"max_props_{bound}", {"type": "object", "maxProperties": bound}
        yield f"pattern_{bound}", {"type": "string", "pattern": f"^([a-z]{{1,9}} ){{1,{bound}}}$"}
    for a, b in ((7, 9), (50, 60), (300, 400), (2_000, 3_000), (9_999, 10_000)):
        rows: object = {"type": "string", "maxLength": b}
        for _ in range(3):
            rows = {"type": "array", "items": rows, "minItems": a, "maxItems": b}
        yield f"rows_{a}_{b}", rows
        texts = [{"pattern": f"a.{{{a}}}b"}, {"pattern": f"c.{{{b}}}d"}, {"minLength": a}]
        yield f"text_all_{a}", {"type": "string", "allOf": texts}
        yield f"text_both_{a}", {"type": "string", "pattern": f"^(.{{{a},{b}}}x)+$", "maxLength": b}
        overlap = {f"^[a-z]{{1,{a}}}$": INTEGER, f"^.{{2,{b}}}$": STRING, "^[^x]*y": {}}
        yield f"overlap_{a}", {"type": "object", "patternProperties": overlap}
        yield f"names_{a}", {"type": "object", "propertyNames": {"pattern": f"^(.{{1,{a}}}_)+$"}}
    for step in (0.1, 0.01, 0.0001, 1e-9, 0.3, 7.77, 3.14159265358979, 1e9, 7919, 10**15 + 37):
        yield f"multiple_{step}", {"type": "number", "multipleOf": step}
        yield f"multiple_int_{step}", {"type": "integer", "multipleOf": step, "minimum": 1e-3}
        both = [{"multipleOf": step}, {"multipleOf": 104729}, {"multipleOf": 0.7}]
        yield f"multiple_all_{step}", {"type": "number", "allOf": both}
    for low, high in ((1e-300, 1e300), (-(10**40), 10**40), (0.123456789, 987654321.987654321)):
        for name in ("integer", "number"):
            yield f"range_{name}_{low}", {"type": name, "minimum": low, "maximum": high}
            exclusive = {"type": name, "exclusiveMinimum": low, "exclusiveMaximum": high}
            yield f"range_open_{name}_{low}", {**exclusive, "multipleOf": 3}
    for form in ("date-time", "uri", "email", "uuid", "ipv6", "hostname", "duration", "regex", "x"):
        yield f"format_{form}", {"type": "string", "format": form, "maxLength": 9_000}
        clash = [{"type": "string", "format": form}, {"pattern": "a.{40}b"}]
        yield f"format_all_{form}", {"allOf": clash}
    fields: dict[str, object] = {"a": {"type": "string", "maxLength": 3_000}, "b": ref}
    for pattern in (_nest(" ", "{0,99}", 4), "(a|b){0,500}.{0,500}", "(", "x" * 100_000):
        options: dict[str, object] = {"whitespace_pattern": pattern, "coerce_one_of": True}
        label = f"options_{len(pattern)}"
        yield label, {"type": "object", "properties": fields, "x-guidance": options}
        options = {"json_allow_general_unicode_escapes": True, "lenient": pattern == "("}
        yield f"{label}_more", {"anyOf": [_obj(fields)], "x-guidance": options}
    yield from ((f"malformed_{i}", text) for i, text in enumerate(MALFORMED_SCHEMAS.split()))
    yield "duplicate_keys", '{"type":"object",' * 1 + ",".join(['"items":{}'] * 50_000) + "}"


def _lines(*parts: Iterable[str]) -> str:
    """Join rules, given one by one or in groups, to a grammar text."""
    rules = ((part,) if isinstance(part, str) else part for part in parts)
    return "\n".join(rule for group in rules for rule in group)


# Grammars separated by ";;": a name, a colon and rules, which are separated by ";".
LARK_LINES = r"""
forced_loop: start: "a" start ;; left_loop: start: start "a" ;; unit_loop: start: start ;;
unit_cycle: start: a ; a: b ; b: a ;; mutual: start: "x" other ; other: "y" start ;;
ambiguous_sum: start: start "+" start | start "*" start | /[0-9]+/ ;;
ambiguous_letters: start: start start | /[a-z]/ ;;
ambiguous_triple: start: start start start | start start | "a" | "" ;;
nullable_pair: start: a a a a ; a: b b b b | "" ; b: start | "x" | "" ;;
greedy_then_x: start: /x+/ "x" ;; greedy_all: start: /(.|\n)*/ start ;;
lazy_all: start: (text)* ; text[lazy]: /(.|\n)*?a/ ;; lazy_empty: start: text* ; text[lazy]: /.*/ ;;
empty_star: start: ("")* ;; empty_plus_star: start: (("" | "a"?)*)+ "b" ;; epsilon: start: "" ;;
missing: start: nothing ;; no_start: x: "a" ;; terminal_loop: start: A ; A: "a" A ;;
ignore_all: %ignore /.*/ ; start: A* ; A: /.{1,500}/ ;;
ignore_counted: %ignore /( {0,90}){0,90}/ ; start: (/[a-z]+/)* ;;
suffix: start: a* ; a[suffix="zz"]: /(.|\n){0,500}/ ;; stop: start: a* ; a[stop="q"]: /(.|\n)*/ ;;
stop_empty: start: a* ; a[stop=""]: /(.|\n)*/ ;;
max_tokens: start: a* ; a[max_tokens=3]: /(.|\n)*/ ;;
temperature: start: a* ; a[temperature=0.5]: /(.|\n)*/ ;;
capture: start: a* ; a[capture]: /(.|\n)/ ;; any_token: start: <[*]>* ;;
token_range: start: (<[0-4294967295]> | /a+/)* ;; token_reversed: start: <[900-3]> ;;
token_unknown: start: <nope> ;; not_terminal: start: A ; A: ~/(.|\n){0,400}a(.|\n){9}/ ;;
reset_forcing: %llguidance {"no_forcing": false} ; start: "a" start ;;
option_bytes: %llguidance {"allow_invalid_utf8": true} ; start: /(?s-u:.)*/ ;;
bad_option: %llguidance {"no_forcing": 3} ; start: "a" ;;
import: %import common.INT ; start: INT* ;;
params_left: start: p::0 ; p::_: "" | p::set_bit(0) "a" | p::set_bit(1) "a" | p::set_bit(2) "a" ;;
params_count: start: p::0 ; p::_: p::incr(_) | "a" ;;
params_nullable: start: p::0 ; p::_: p::incr(_) p::decr(_) | ""
"""


def _larks() -> Named:
    for line in LARK_LINES.split(";;"):
        name, body = line.strip().split(": ", 1)
        yield name, body.replace(" ; ", "\n")
    forms = ('"{0}" p::set_bit({0})', 'p::set_bit({0}) "a"', "p::set_bit({0}) p::incr(_)")
    for i, form in enumerate(forms):
        bits = " | ".join(form.format(bit) for bit in range(60))
        yield f"params_{i}", f'start: p::0\np::_: "" | {bits}'
    yield "nested_lark", "start: %lark { start: " * 200 + '"a"' + " }" * 200
    for size in (3, 30, 300, 3_000, 30_000):
        ids = range(size)
        words = (f'r{i}: "" | "a" | r{i * 7 % 39 + 1}' for i in range(1, 40))
        counted = (f"T{i}: /[a-z]{{{i % 50},{i % 50 + 9}}}{i}/" for i in ids)
        cross = (f"/(.{{{i % 60},{i % 60 + 90}}}[^{chr(97 + i % 26)}])+/" for i in ids)
        each = (f"a{i}: /.{{1,{i % 90 + 1}}}/ a{(i + 1) % size} | /[0-9]/" for i in ids)
        texts = {
            "rules": _lines((f'r{i}: "k{i}" r{i + 1} | r{i + 1}' for i in ids), f'r{size}: "z"'),
            "unit": _lines((f"r{i}: r{i + 1}" for i in ids), f"r{size}: /z+/"),
            "nullable": _lines("r0: " + " ".join(f"r{i % 39 + 1}" for i in ids), words),
            "terminals": _lines("r0: (" + " | ".join(f"T{i}" for i in ids) + ")*", counted),
            "parens": "r0: " + _nest('"a"', "", size),
            "group_star": "r0: " + _nest('"a"', "*", size),
            "repeat": f'r0: ("a" | b){{0,{size}}}\nb: /[a-z]/{{{size}}}',
            "repeat_nest": f'r0: ((("a"{{0,{size}}} "b"?){{0,{size}}}){{0,{size}}}){{1,{size}}}',
            "intersect": "r0: A\nA: " + " & ".join(cross),
            "negate": "r0: A\nA: " + " & ".join(f"~/(?s:.*)w{i}(?s:.*)/" for i in ids),
            "tilde": "r0: A\nA: " + "~" * size + "/a/",
            "substring": 'r0: A+\nA: %regex {"substring_chars": "' + "abcab" * size + '"}',
            "json": "r0: " + " | ".join(['%json {"type":"array"}'] * size),
            "dot_letters": f"r0: (/./ | /[a-z]/ | /./ /./){{0,{size}}}",
            "many_classes": _lines("r0: (" + " | ".join(f"a{i} /{i}/" for i in ids) + ")+", each),
            "ignores": "%ignore / +/\n" * size + "r0: /[a-z]/*",
        }
        yield from ((f"{name}_{size}", f"start: r0\n{text}") for name, text in texts.items())
        pairs = _lines('r0: "a" | ""', (f"r{i + 1}: r{i} r{i}" for i in ids))
        yield f"doubling_{size}", f"start: r{size}\n{pairs}"
        pairs = _lines('T0: "a" | "b"', (f"T{i + 1}: T{i} T{i}" for i in ids))
        yield f"term_doubling_{size}", f"start: T{size}\n{pairs}"


GBNF_LINES = r"""
loop: root ::= "a" root ;; left: root ::= root "a" | "a" ;; self: root ::= root ;;
pair: root ::= x ; x ::= y "b" ; y ::= x "c" ;; ambiguous: root ::= root root | [a-z] ;;
nullable: root ::= x x x x ; x ::= (x x | "a" | "")? ;; missing: root ::= nothing ;;
broken: root ::= "a ;; expression: root ::= root [-+*/] root | "(" root ")" | [0-9]+ ;;
dots: root ::= (.{0,200} [^a]{0,200}){0,200} ;; words: root ::= ([a-z]{1,90} " "){1,90}
"""


def _gbnfs() -> Named:
    for line in GBNF_LINES.split(";;"):
        name, body = line.strip().split(": ", 1)
        yield name, body.replace(" ; ", "\n")
    for size in (10, 100, 900, 3_000, 20_000):
        yield f"parens_{size}", "root ::= " + "(" * size + '"a"' + ")" * size
        yield f"stars_{size}", "root ::= " + "(" * size + '"a"' + ")*" * size
        yield f"alternatives_{size}", "root ::= " + " | ".join(f'"{t}"' for t in _strings(size, 9))
        rules = (f'r{i} ::= "a" r{i + 1} | r{i + 1} "b"' for i in range(size))
        yield f"rules_{size}", _lines("root ::= r0", rules, f'r{size} ::= "z"')
        yield f"repeat_{size}", f'root ::= (("a" | [b-z]){{0,{size}}} "x"){{0,{size}}}'
        yield f"sequence_{size}", "root ::= " + "[a-z]? " * size


def _choices() -> Named:
    for count, length in ((10, 9), (1_000, 900), (10_000, 20), (90_000, 9), (20_000, 400)):
        yield f"strings_{count}_{length}", json.dumps(_strings(count, length))
    for length in (10_000, 300_000, 3_000_000):
        yield f"long_{length}", json.dumps(["y" * length, "z" * length])
    yield "prefixes", json.dumps(["a" * i for i in range(1, 1_200)])
    yield "unicode", json.dumps([chr(0x4E00 + i) * 3 for i in range(20_000)])
    yield "same", json.dumps(["same"] * 50_000)
    escapes = ['"', "\\", "\n", "\0", "/", "\ud83d\ude00", "a|b", "%json {}", "\r\n"]
    yield "escapes", json.dumps(escapes)
    yield from (("empty", "[]"), ("empty_string", '[""]'), ("nested", '[["a"]]'), ("text", "nope"))


def hostile_grammars() -> list[Grammar]:
    """Return (unique name, kind, text) of each, always in the same order.

    Kinds are those of `KINDS`. Texts of the kind `choice` are JSON lists of strings, save for a
    few malformed ones. At most 25 texts exceed 1 MB.
    """
    schemas = ((n, v if isinstance(v, str) else json.dumps(v)) for n, v in _schemas())
    families = zip(KINDS, (_regexes(), schemas, _larks(), _gbnfs(), _choices()), strict=True)
    found = [(f"{kind}:{name}", kind, text) for kind, family in families for name, text in family]
    return found
