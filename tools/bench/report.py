"""What the benchmark has measured, as the reference's table and what explains it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PHASES = {
    "vision_forward": "ViT fwd", "exchange": "exchange", "language": "LLM", "vision_backward": "ViT bwd",
    "reduce": "reduce", "optimizer": "optimizer", "forward_backward": "fwd + bwd",
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Measured:
    """What was seen of one variant, over all its rounds; times and phases of timed steps, losses of all by step.

    Attributes:
        layout: in words.
        kind: `homogeneous`, `colocated`, `text` or `peer`.
        round_s: step times of each round.
        host_s: of each timed step, seconds the host took to launch a phase; empty on a CPU.
        flops, vision_flops, num_tokens, visual_share: of the step after the warm-up.
        memory_gib: most that was reserved on a GPU, of the fullest rank; 0 where unknown.
    """

    name: str
    layout: str
    kind: str
    round_s: list[list[float]] = field(default_factory=list)
    build_s: list[float] = field(default_factory=list)
    phase_s: list[dict[str, float]] = field(default_factory=list)
    host_s: list[dict[str, float]] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)
    load_max_over_mean: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    flops: float = 0.0
    vision_flops: float = 0.0
    visual_share: float = 0.0
    num_tokens: int = 0

    @property
    def step_s(self) -> list[float]:
        """All step times."""
        return [seconds for one in self.round_s for seconds in one]

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.step_s)

    @property
    def rate(self) -> float:
        """Model FLOP/s of all ranks together."""
        return self.flops / self.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the lines under the table say of the machine.

    Attributes:
        peak: FLOP/s of a GPU that `MFU` is a share of, None where unknown.
        measured_peak: FLOP/s of a large bf16 product on this machine, None where not measured.
    """

    machine: str
    world: int
    peak: float | None
    measured_peak: float | None


def efficiency(measured: Measured, text: Measured) -> float:
    """E = (T_text_only + T_vision_ideal) / T: how near a step is to one in which visual work costs no more than text.

    T_vision_ideal is the time of the encoder's FLOPs at the rate, in FLOP/s, that the text-only step runs at.
    """
    return (text.median_s + measured.vision_flops / text.rate) / measured.median_s


def loss_differences(measured: Measured, reference: Measured, which: int) -> list[float]:
    """|loss / loss of the reference - 1| by step; `which`: 0 language, 1 multi-token prediction."""
    steps = sorted(set(measured.losses) & set(reference.losses))
    pairs = [(measured.losses[step][which], reference.losses[step][which]) for step in steps]
    return [abs(found / expected - 1) for found, expected in pairs if expected and found]


def report(results: Sequence[Measured], context: Context) -> str:
    """Both tables as Markdown; the first homogeneous variant is the baseline, the fastest one the second baseline."""
    return "\n".join([*_table(results, context), "", *_phases(results), "", *_notes(results, context)])


def _table(results: Sequence[Measured], context: Context) -> list[str]:
    same = [m for m in results if m.kind == "homogeneous"]
    baseline, best = (same[0], min(same, key=lambda m: m.median_s)) if same else (None, None)
    text = next((m for m in results if m.kind == "text"), None)
    compared = lambda m: m.kind in ("homogeneous", "colocated")  # noqa: E731 - the same model and loss
    columns: dict[str, Callable[[Measured], str]] = {
        "variant": lambda m: f"{m.name} ({m.layout})",
        "step ms, median (min-max)": lambda m: _spread([1e3 * seconds for seconds in m.step_s]),
        "TFLOP/s a GPU": lambda m: f"{m.rate / context.world / 1e12:.4g}",
        "against baseline": lambda m: _gain(m, baseline) if compared(m) else "-",
        "against best homogeneous": lambda m: _gain(m, best) if compared(m) else "-",
        "tokens/s a GPU": lambda m: f"{m.num_tokens / m.median_s / context.world:.0f}",
        "MFU %": lambda m: f"{100 * m.rate / context.world / context.peak:.1f}" if context.peak else "-",
        "E": lambda m: f"{efficiency(m, text):.3f}" if text is not None and compared(m) else "-",
        "load max/mean": lambda m: f"{max(m.load_max_over_mean):.3f}",
        "memory GiB": lambda m: f"{m.memory_gib:.1f}" if m.memory_gib else "-",
        "LM loss diff %, mean/max": lambda m: _difference(m, baseline, 0) if compared(m) else "-",
        "MTP loss diff %, mean/max": lambda m: _difference(m, baseline, 1) if compared(m) else "-",
    }
    return _markdown(columns, results)


def _phases(results: Sequence[Measured]) -> list[str]:
    """Milliseconds of each phase on rank 0, medians over the timed steps; on a GPU also the host's, after a stroke."""
    seen = [name for name in PHASES if any(name in phases for m in results for phases in m.phase_s)]

    def phase(name: str) -> Callable[[Measured], str]:
        def text(m: Measured) -> str:
            spans = [m.phase_s, m.host_s] if any(m.host_s) else [m.phase_s]
            medians = [statistics.median(phases.get(name, 0.0) for phases in span) for span in spans]
            return " / ".join(f"{1e3 * seconds:.4g}" for seconds in medians)

        return text

    columns: dict[str, Callable[[Measured], str]] = {
        "ms a step": lambda m: m.name,
        "data wait": lambda m: f"{1e3 * statistics.median(m.data_wait_s):.1f}",
        **{PHASES[name]: phase(name) for name in seen},
        "build s": lambda m: f"{statistics.median(m.build_s):.0f}",
    }
    return _markdown(columns, results)


def _notes(results: Sequence[Measured], context: Context) -> list[str]:
    first = max(results, key=lambda m: m.visual_share)
    share = first.vision_flops / first.flops
    rounds, steps = max(len(m.round_s) for m in results), sum(len(m.step_s) for m in results) / len(results)
    lines = [
        f"{context.machine}; {context.world} ranks; {rounds} round(s) in turns, {steps:.0f} timed steps a variant.",
        f"Visual tokens {100 * first.visual_share:.1f} %, ViT {100 * share:.1f} % of the model FLOPs, "
        f"{first.num_tokens} tokens a step.",
    ]
    if context.peak:
        lines.append(f"MFU: of {context.peak / 1e12:.4g} TFLOP/s a GPU.")
    if context.measured_peak:
        lines.append(f"A bf16 product of 8192^3 ran at {context.measured_peak / 1e12:.0f} TFLOP/s on this GPU.")
    return lines


def _markdown(columns: dict[str, Callable[[Measured], str]], results: Sequence[Measured]) -> list[str]:
    rows = [[cell(m) for cell in columns.values()] for m in results]
    return [f"| {' | '.join(row)} |" for row in (list(columns), ["---"] * len(columns), *rows)]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def _gain(measured: Measured, other: Measured | None) -> str:
    """How much faster in throughput."""
    if other is None:
        return "-"
    return "0" if measured is other else f"{100 * (measured.rate / other.rate - 1):+.1f} %"


def _difference(measured: Measured, baseline: Measured | None, which: int) -> str:
    found = [] if baseline is None or measured is baseline else loss_differences(measured, baseline, which)
    return f"{100 * statistics.fmean(found):.4f} / {100 * max(found):.4f}" if found else "-"
