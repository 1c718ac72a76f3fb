"""Policy strings: what `jamp.get_policy` reads and `str(policy)` writes.

    spec     = dtype | settings | level [":" half] ["," settings]
    settings = key "=" value {"," key "=" value}
    level    = "O0" | "OD" | "O1" | "O2" | "O3" | "auto" | "mixed_float16" | "mixed_bfloat16" | preset
    preset   = "pytorch" | "paddle" | "mindspore" | "mxnet" | "megengine" | "apex"
    key      = "p" | "c" | "o" | "half" | "full" | "promote" | "float8" | "highest" | a name in SETTINGS

`p`, `c` and `o` (or `params`, `compute`, `output`) take a dtype, the settings a word, the rule lists a Python list of
strings or a lone entry. The grammar contains jmp's.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jamp._dtypes import ACCEPTED, FLOAT32, FLOAT64, HALF_DTYPES, close_matches, half_dtype, parse_dtype
from jamp._policy.presets import PRESETS

LEVELS = ("O0", "OD", "O1", "O2", "O3")
RULE_LISTS = ("half", "full", "promote", "float8", "highest")

# What a setting may be, its default first. Without a level, and at O0, nothing but `residuals="all"` and defaults.
SETTINGS = {
    "residuals": ("half", "all"),
    "attention": ("as written", "fused"),
    "reduce": ("half", "float32"),
    "matmul": ("half", "float8", "mxfp8"),
    "grad_dtype": ("e4m3", "e5m2"),
    "float8_scales": ("tensor", "row"),
    "weight_grad": ("float8", "half"),
}

_NEARLY_SURE = 0.7  # As `difflib` counts what two words share.
_FLOAT8: Mapping[str, str] = dict.fromkeys(("f8", "fp8", "8bit", "e4m3"), "float8")  # What others call it.
_OF_EIGHT_BITS = ("grad_dtype", "float8_scales", "weight_grad")  # These settings say how, and not which.

HOW_TO_SPELL = (
    "Accepted are a level ('O0', 'OD', 'O1', 'O2', 'O3' or 'auto', each alone or with ':float16' or ':bfloat16'), "
    f"the op lists of a framework ({', '.join(map(repr, PRESETS))}, likewise), "
    "'mixed_float16' and 'mixed_bfloat16' (O2), three dtypes ('p=f32,c=bf16,o=f32'), one dtype for all three ('half', "
    "'full', 'f16', 'fp16', 'bf16', 'f32', 'f64'), and a jamp.Policy."
)

_KERAS = {"mixed_float16": "O2:float16", "mixed_bfloat16": "O2:bfloat16"}  # Of keras.mixed_precision, and Flax's guide.

_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    **{name: name for name in (*RULE_LISTS, *SETTINGS)},
}
_HEAD = re.compile(r"\s*(?P<level>[^\s:,=]+)\s*(?::\s*(?P<half>[^,=]*?)\s*)?(?:,(?=.)|$)")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_SETTING = re.compile(rf"\s*(?P<key>\w+)\s*=\s*(?P<value>\[(?:{_QUOTED}|[^\]'\"])*\]|[^,=\[\]]+?)\s*(?:,(?=.)|$)")


def level_fields(level: str, compute_dtype: np.dtype) -> dict[str, Any]:
    """The dtypes that a level has unless told otherwise."""
    if level == "O0":
        compute_dtype = FLOAT32
    param_dtype = compute_dtype if level == "O3" else FLOAT32
    return dict(level=level, param_dtype=param_dtype, compute_dtype=compute_dtype, output_dtype=FLOAT32)


def plain_settings(level: str | None) -> dict[str, str]:
    """The settings that a level has unless told otherwise."""
    plain = {name: values[0] for name, values in SETTINGS.items()}
    return plain | {"residuals": "all"} if level in (None, "O0") else plain


def canonical_settings(given: Mapping[str, Any], compute_dtype: np.dtype) -> dict[str, Any]:
    """Settings whose values are dtypes, or their names, as the words of `SETTINGS`; others as they are.

    Args:
        given: Values by the names of settings.
        compute_dtype: What `"half"` stands for.
    """
    return {name: _canonical(value, SETTINGS[name], compute_dtype) for name, value in given.items()}


def _canonical(value: Any, words: tuple[str, ...], compute_dtype: np.dtype) -> Any:
    if value in words:
        return value
    word = value.strip().lower() if isinstance(value, str) else _name_of(value)
    word = word.removeprefix("float8_").removesuffix("fn")  # As dtypes are called: `float8_e4m3fn`.
    if word in ACCEPTED and parse_dtype(word) in (FLOAT32, compute_dtype):
        word = "half" if parse_dtype(word) == compute_dtype else "float32"
    return word if word in words else value


def _name_of(value: object) -> str:
    try:
        return np.dtype(value).name if isinstance(value, type | np.dtype) else ""  # pyright: ignore[reportArgumentType]
    except TypeError:
        return ""


def check_settings(level: str | None, given: dict[str, str]) -> None:
    """Raises `ValueError` where a setting is none of its values, or has no meaning at the level."""
    for name, value in given.items():
        if value not in SETTINGS[name]:
            expected = ", ".join(map(repr, SETTINGS[name]))
            hint = close_matches(_FLOAT8.get(str(value).lower(), str(value)), SETTINGS[name])
            raise ValueError(f"`{name}` is {value!r}: expected {expected} or None.{hint}")
        if level in (None, "O0") and name != "residuals" and value != SETTINGS[name][0]:
            what = "O0" if level else "a policy without a level, which only casts arguments and results"
            raise ValueError(f"`{name}={value}` means nothing to {what}. Write it after a level: 'O2,{name}={value}'.")


def check_rules(level: str | None, rules: Mapping[str, tuple[str, ...]]) -> None:
    """Raises `ValueError` where rules steer what nothing interprets.

    A float32 run to compare with may have those of the others, and does nothing with them; but 8 bits are no float32.
    """
    if level is None and any(rules.values()):
        raise ValueError(
            "Rules steer what happens inside a function, and a policy without a level only casts arguments and "
            "results. Start from a level: jamp.get_policy('O2').with_rules(...)."
        )
    if level == "O0" and rules["float8"]:
        rule = f"float8={[*rules['float8']]}"
        raise ValueError(f"`{rule}` means nothing to O0. Write it after another level: 'O1,{rule}'.")


def check_products(settings: Mapping[str, str | None], rules: Mapping[str, tuple[str, ...]]) -> None:
    """Raises `ValueError` where what a policy says of products in 8 bits has no product to act on, or is not possible.

    Args:
        settings: The values of all settings.
        rules: The entries of all rule lists.
    """
    matmul = settings["matmul"]
    if matmul == "mxfp8" and settings["float8_scales"] != SETTINGS["float8_scales"][0]:
        raise ValueError(
            f"`float8_scales={settings['float8_scales']}` means nothing to `matmul=mxfp8`, which has a scale for each "
            "block of 32. Leave it out, or write 'matmul=float8,float8_scales=row'."
        )
    if rules["float8"]:
        return
    if matmul in (None, SETTINGS["matmul"][0]):
        for name in _OF_EIGHT_BITS:
            if settings[name] not in (None, SETTINGS[name][0]):
                raise ValueError(
                    f"`{name}={settings[name]}` means nothing here: no product of the policy is in 8 bits. Write "
                    f"'matmul=float8,{name}={settings[name]}', or name products by a rule, float8=['*scope*']."
                )
        return
    for name in ("half", "full", "promote", "highest"):
        if "dot_general" in {entry.removeprefix("prim:") for entry in rules[name]}:
            raise ValueError(
                f"`matmul={matmul}` has no product to act on: {name}={list(rules[name])} keeps all of them out, as the "
                f"lists of other frameworks do. Write a level instead of a preset, 'O1,matmul={matmul}', or take "
                "'dot_general' out of the list."
            )


def check_wide_gradients(level: str | None, param_dtype: np.dtype) -> None:
    """Raises `ValueError` where gradients cannot be float32 from the product on, as `reduce=float32` has them."""
    if param_dtype in HALF_DTYPES:
        raise ValueError(
            f"`reduce=float32`: gradients have the dtype of their parameters, which is {param_dtype}. Keep these in "
            f"float32, '{level},p=float32,reduce=float32', or wrap the gradient function in `jamp.float32_gradients`."
        )


def parse_spec(spec: str) -> dict[str, Any]:
    """Parses a policy string.

    Args:
        spec: The string.

    Returns:
        Keyword arguments for `jamp.Policy`.

    Raises:
        ValueError: If the string is no policy; the message says what is accepted.
    """
    spec = _as_level(spec)
    head = _HEAD.match(spec)
    if head is None:
        given = _parse_settings(spec, 0)
        param_dtype = given.pop("param_dtype", FLOAT32)
        compute_dtype = given.pop("compute_dtype", param_dtype)
        output_dtype = given.pop("output_dtype", compute_dtype)
        return dict(param_dtype=param_dtype, compute_dtype=compute_dtype, output_dtype=output_dtype, **given)
    given = _parse_settings(spec, head.end()) if head.end() < len(spec) else {}
    fields = _parse_head(spec, head["level"], head["half"], given)
    if "level" not in fields and given:
        raise _error(spec, f"{head['level']!r} stands for all three dtypes, and takes no settings.")
    if "compute_dtype" in given:
        raise _error(spec, f"the compute dtype of a level comes after a colon: '{head['level']}:float16'.")
    # Rules that are given come in addition to those of a preset.
    return (
        fields | given | {name: fields[name] + given[name] for name in RULE_LISTS if name in fields and name in given}
    )


def names_half(spec: str) -> bool:
    """Whether a policy string means the same on all devices, because it names the half dtype of its level."""
    head = _HEAD.match(_as_level(spec))
    return head is not None and head["half"] not in (None, "half") and "=half" not in spec


def _as_level(spec: str) -> str:
    """A policy string with the level that the name of a Keras policy in front of it stands for."""
    name = spec.strip().partition(",")[0]
    return spec.replace(name, _KERAS[name], 1) if name in _KERAS else spec


def _parse_head(spec: str, level: str, half: str | None, given: dict[str, Any]) -> dict[str, Any]:
    if level in LEVELS or level == "auto":
        single = half is not None and half in ACCEPTED and parse_dtype(half) == FLOAT32
        if single and given.get("param_dtype", FLOAT32) == FLOAT64:
            return level_fields(level, FLOAT32)  # Half of a float64 program.
        return level_fields("O2" if level == "auto" else level, _half_named(spec, half))
    if level in PRESETS:
        return level_fields("O1", _half_named(spec, half)) | PRESETS[level]
    if half is None and level in ACCEPTED:
        return dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), parse_dtype(level))
    if level in ACCEPTED:
        problem = f"Unknown dtype or level {level!r} with a colon: a dtype takes none."
        raise _error(spec, problem, f" Write {level!r} alone, or 'O2:{half}'.")
    if level in _KERAS:
        raise _error(spec, f"{level!r} names its half dtype already.", f" Write {level!r} alone, or 'O2:{half}'.")
    raise _misspelt(spec, f"Unknown dtype or level {level!r}.", level, (*LEVELS, "auto", *_KERAS, *PRESETS, *ACCEPTED))


def _half_named(spec: str, name: str | None) -> np.dtype:
    if name is None:
        return half_dtype()
    if name in ACCEPTED and (dtype := parse_dtype(name)) in HALF_DTYPES:
        return dtype
    problem = f"a level's half dtype is 'float16' or 'bfloat16', not {name!r}."
    if name in ACCEPTED and parse_dtype(name) in (FLOAT32, FLOAT64):
        of_float64 = f"'{spec.partition(':')[0]}:float32,p=float64,o=float64' computes the products in float32"
        raise _error(spec, problem, f" Write 'O0' for all of it in float32; of a program in float64, {of_float64}.")
    if (eight_bits := _FLOAT8.get(name.lower(), name.lower())) in SETTINGS["matmul"]:
        raise _error(spec, problem, f" Write '{spec.partition(':')[0]},matmul={eight_bits}' for products in 8 bits.")
    raise _misspelt(spec, problem, name, ("float16", "bfloat16", "f16", "fp16", "bf16", "half"))


def _parse_settings(spec: str, start: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    while start < len(spec) or not given:
        match = _SETTING.match(spec, start)
        if match is None:
            raise _error(spec, f"expected key=value, got {spec[start:]!r}.")
        name = _KEYS.get(match["key"])
        if name is None:
            sure = close_matches(match["key"], _KEYS, _NEARLY_SURE)
            expected = "" if sure else f", expected one of {', '.join(_KEYS)}"
            raise _misspelt(spec, f"unknown key {match['key']!r}{expected}.", match["key"], _KEYS)
        if name in given:
            raise _error(spec, f"{match['key']!r} is given twice.")
        given[name] = _parse_value(spec, name, match["value"])
        start = match.end()
    return given


def _parse_value(spec: str, name: str, value: str) -> Any:
    if name in SETTINGS:
        return value
    if name.endswith("_dtype"):
        return parse_dtype(value)
    return _parse_list(spec, name, value) if value.startswith("[") else (value,)


def _parse_list(spec: str, name: str, value: str) -> tuple[str, ...]:
    problem = f"expected a list of strings such as {name}=['softmax', '*lm_head*'], got {value}."
    try:
        entries = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise _error(spec, problem) from None
    if not all(isinstance(entry, str) for entry in entries):
        raise _error(spec, problem)
    return tuple(entries)


def _misspelt(spec: str, problem: str, word: str, choices: Iterable[str]) -> ValueError:
    """What is wrong with a policy string, and what was meant; if that is nearly sure, without all that is accepted."""
    choices = [*choices]
    if hint := close_matches(word, choices, _NEARLY_SURE):
        return _error(spec, problem, hint)
    return _error(spec, problem + close_matches(word, choices))


def _error(spec: str, problem: str, answer: str = "") -> ValueError:
    """What is wrong with a policy string, with what to write or, without an answer, with all that is accepted."""
    return ValueError(f"Policy {spec!r}: {problem}{_meant(spec) or answer or ' ' + HOW_TO_SPELL}")


def _meant(spec: str) -> str:
    """What to write for a level alone or with a half dtype, in whatever order and put together however."""
    words = [word for word in re.split(r"[^\w]+|_", spec) if word]
    levels = [word.upper() for word in words if word.upper() in LEVELS]
    halves = [word for word in words if word in ACCEPTED and parse_dtype(word) in HALF_DTYPES]
    if len(levels) != 1 or len(levels) + len(halves) != len(words):
        return ""
    return f" Write '{':'.join([*levels, *halves[:1]])}'."
