"""How weights and KV are stored: number formats, and which of them the parts of a quantised model have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from ampd.errors import UserError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How weights are stored, and multiplied with.

    Attributes:
        bits: of a weight, with its share of the scales.
        needs: the data type that a GPU must compute in, so that engines multiply without unpacking to 16 bits.
        computes: the data type of the multiplication then.
    """

    name: str
    bits: float
    needs: str = "bf16"
    computes: str = "bf16"


BF16 = NumberFormat("16-bit", 16)
FP8 = NumberFormat("fp8", 8, "fp8", "fp8")
INT8 = NumberFormat("int8", 8, "fp8", "fp8")
"""GPUs with fp8 multiply int8 as fast, by their data sheets."""
W8 = NumberFormat("8-bit weights", 8.125)
INT4 = NumberFormat("int4", 4.25)
"""AWQ, GPTQ and other 4-bit weights beside 16-bit activations: unpacked in the kernel."""
MXFP4 = NumberFormat("mxfp4", 4.25, "fp4", "fp8")
"""A scale of 8 bits for 32 values; GPUs with fp4 multiply it with 8-bit activations."""
NVFP4 = NumberFormat("nvfp4", 4.5, "fp4", "fp4")
"""A scale of 8 bits for 16 values."""

_ALGORITHMS = {
    "FP8": FP8,
    "FP8_PB_WO": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "MXFP8": FP8,
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NumberFormat("nvfp4", 4.5),
    "W4A16_AWQ": INT4,
    "W4A8_AWQ": INT4,
    "W4A8_MXFP4_FP8": MXFP4,
    "W8A16": W8,
    "INT8_SQ": INT8,
}
"""By the names of NVIDIA's Model Optimizer."""

_METHODS = {"fp8": FP8, "fbgemm_fp8": FP8, "mxfp4": MXFP4, "awq": INT4, "gptq": INT4, "auto-round": INT4}
"""By `quant_method`, where a configuration says nothing more."""

_PREFIX = re.compile(r"(?:model\.|language_model\.|backbone\.)*(?=layers\.)")
"""What precedes the layers in the names of modules."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a model's modules, by name from `layers.` on.

    Attributes:
        groups: (pattern of names or None: all, format); the first that fits.
        kept: patterns of modules that stay at 16 bits.
        kv_bits: of a value of KV.
        block: rows of weights with a common scale; 0: no such blocks.
    """

    groups: tuple[tuple[re.Pattern[str] | None, NumberFormat], ...] = ()
    named: Mapping[str, NumberFormat] | None = None
    kept: frozenset[str] = frozenset()
    kept_patterns: tuple[re.Pattern[str], ...] = ()
    kv_bits: float = 16
    block: int = 0

    @classmethod
    def of(cls, config: object, where: str) -> Quantization:
        """From a `quantization_config`; None: 16 bits.

        Raises:
            UserError: a method that is not known.
        """
        if not config:
            return cls()
        if not isinstance(config, dict):
            raise UserError(f"{where}: quantization_config must be an object")
        kept, patterns = _kept(config)
        named = {
            _PREFIX.sub("", str(name), count=1): _algorithm(str(layer.get("quant_algo")), where)
            for name, layer in _object(config.get("quantized_layers")).items()
            if isinstance(layer, dict)
        }
        groups = () if named else tuple(_groups(config, where))
        blocks = config.get("weight_block_size")
        block = blocks[0] if isinstance(blocks, list) and blocks and isinstance(blocks[0], int) else 0
        return cls(groups, named, frozenset(kept), tuple(patterns), _kv_bits(config), max(block, 0))

    def format_of(self, *names: str) -> NumberFormat:
        """The format of a module, under any of the names that it has in checkpoints."""
        if any(self._keeps(name) for name in names):
            return BF16
        if self.named:
            found = (self.named.get(part) for name in names for part in _parents(name))
            return next((each for each in found if each is not None), BF16)
        return next((each for pattern, each in self.groups if pattern is None or _any(pattern, names)), BF16)

    def _keeps(self, name: str) -> bool:
        return any(part in self.kept for part in _parents(name)) or any(
            pattern.match(f"model.{name}") or pattern.match(name) for pattern in self.kept_patterns
        )


def _any(pattern: re.Pattern[str], names: tuple[str, ...]) -> bool:
    return any(pattern.match(f"model.{name}") for name in names)


def _parents(name: str) -> Iterator[str]:
    """The module and all that hold it, each from `layers.` on, and from below its layer on."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
        if end > 2:
            yield ".".join(parts[2:end])


def _kept(config: Mapping[str, Any]) -> tuple[list[str], list[re.Pattern[str]]]:
    """Modules that stay at 16 bits: whole names, and patterns."""
    lists = (config.get(key) for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"))
    entries = [_PREFIX.sub("", str(entry), count=1) for found in lists if isinstance(found, list) for entry in found]
    dynamic = _object(config.get("dynamic"))  # GPTQ: `-:` and a pattern
    entries += [f"re:{key[2:]}" for key in dynamic if str(key).startswith("-:")]
    patterns = [_pattern(entry) for entry in entries if entry.startswith("re:") or "*" in entry]
    return [entry for entry in entries if "*" not in entry], patterns


def _pattern(entry: str) -> re.Pattern[str]:
    """Of the module and all below it."""
    try:
        return re.compile(entry[3:] if entry.startswith("re:") else rf"{translate(entry)[:-2]}(\..*)?\Z")
    except re.error:
        return re.compile(r"(?!)")


def _groups(config: Mapping[str, Any], where: str) -> Iterator[tuple[re.Pattern[str] | None, NumberFormat]]:
    groups = [group for group in _object(config.get("config_groups")).values() if isinstance(group, dict)]
    if algorithm := config.get("quant_algo"):
        yield None, _algorithm(str(algorithm), where)
    elif groups:
        for group in groups:
            listed = group.get("targets")
            targets = [str(target) for target in listed] if isinstance(listed, list) else []
            patterns: list[re.Pattern[str] | None] = [_pattern(each) for each in targets if each.startswith("re:")]
            for pattern in patterns or [None]:
                yield pattern, _scheme(group, str(group.get("format") or config.get("format")), where)
    else:
        method = str(config.get("quant_method")).lower()
        if method not in _METHODS:
            raise UserError(f"{where}: quant_method {method!r} is not known ({', '.join(sorted(_METHODS))}, ...)")
        bits = config.get("bits", config.get("w_bit", 4))
        yield None, W8 if _METHODS[method] is INT4 and bits == 8 else _METHODS[method]


def _algorithm(name: str, where: str) -> NumberFormat:
    if name.upper() not in _ALGORITHMS:
        raise UserError(f"{where}: quant_algo {name!r} is not known ({', '.join(sorted(_ALGORITHMS))})")
    return _ALGORITHMS[name.upper()]


def _scheme(group: Mapping[str, Any], layout: str, where: str) -> NumberFormat:
    """The format of a group of compressed-tensors."""
    weights, activations = _object(group.get("weights")), group.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if bits == 4 and kind == "float":
        found = MXFP4 if layout.startswith("mxfp4") or weights.get("group_size") == 32 else NVFP4
        return found if activations or found is MXFP4 else NumberFormat("nvfp4", NVFP4.bits)
    if bits == 4:
        group_size = weights.get("group_size") or 128
        return NumberFormat("int4", 4 + 16 / group_size) if isinstance(group_size, int) and group_size > 0 else INT4
    if bits == 8:
        return (FP8 if kind == "float" else INT8) if activations else W8
    raise UserError(f"{where}: weights of {bits} bits, type {kind}, are not known")


def _kv_bits(config: Mapping[str, Any]) -> float:
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return 8 if scheme.get("num_bits") == 8 else 16
    return 8 if isinstance(scheme, str) and scheme.upper() == "FP8" else 16


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
