"""The benchmark's table: what each figure means, worked out by hand."""

from __future__ import annotations

import pytest

from tools.bench.report import Context, Measured, efficiency, loss_differences, report


def measured(name: str, kind: str, seconds: list[float], **values: object) -> Measured:
    """A variant with steps of these lengths, and 8 PFLOP a step of which the encoder has 2."""
    made = Measured(
        name=name, layout="ViT TP2", kind=kind, round_s=[seconds], build_s=[1.0], flops=8e15, vision_flops=2e15,
        phase_s=[{"language": 0.5 * one, "vision_forward": 0.25 * one} for one in seconds],
        load_max_over_mean=[1.01], data_wait_s=[0.001], num_tokens=1000, visual_share=0.5,
    )  # fmt: skip
    for key, value in values.items():
        setattr(made, key, value)
    return made


def test_efficiency_is_what_vision_would_cost_at_the_rate_of_text() -> None:
    """6 PFLOP of text take 3 s, so 2 PFLOP of vision should take 1 s: a step of 5 s is 4/5 efficient."""
    text = measured("text", "text", [3.0], flops=6e15, vision_flops=0.0)
    assert efficiency(measured("f8", "colocated", [5.0]), text) == pytest.approx(0.8)


def test_loss_differences_are_relative_and_of_common_steps() -> None:
    first = measured("unified", "homogeneous", [1.0], losses={0: [4.0, 2.0], 1: [2.0, 0.0]})
    second = measured("f8", "colocated", [1.0], losses={0: [4.4, 1.0], 1: [2.0, 5.0], 2: [9.0, 9.0]})
    assert loss_differences(second, first, 0) == pytest.approx([0.1, 0.0])
    assert loss_differences(second, first, 1) == pytest.approx([0.5])


def test_table() -> None:
    """Against the first homogeneous layout and against the fastest; peers and text are not compared."""
    results = [
        measured("unified", "homogeneous", [4.0, 6.0, 5.0], losses={0: [4.0, 2.0]}),
        measured("unified:tp1", "homogeneous", [4.0], losses={0: [4.0, 2.0]}),
        measured("f8", "colocated", [2.5], losses={0: [4.04, 2.0]}, memory_gib=50.0),
        measured("text", "text", [1.5], flops=6e15, vision_flops=0.0, visual_share=0.0),
        measured("fsdp2:mb8", "peer", [10.0], phase_s=[{"forward_backward": 9.0}], host_s=[{"forward_backward": 0.3}]),
    ]
    context = Context(machine="a machine", world=2, peak=1e15, measured_peak=8e14)
    lines = report(results, context).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    cells = {name: rest for name, *rest in rows}
    assert cells["unified (ViT TP2)"][:6] == ["5000 (4000-6000)", "800", "0", "-20.0 %", "100", "80.0"]
    assert cells["f8 (ViT TP2)"][:7] == ["2500 (2500-2500)", "1600", "+100.0 %", "+60.0 %", "200", "160.0", "0.800"]
    assert cells["f8 (ViT TP2)"][8:] == ["50.0", "1.0000 / 1.0000", "0.0000 / 0.0000"]
    assert cells["fsdp2:mb8 (ViT TP2)"][2:4] == ["-", "-"]
    header = cells["ms a step"]
    assert header == ["data wait", "ViT fwd", "LLM", "fwd + bwd", "build s"]
    assert cells["unified"] == ["1.0", "1250", "2500", "0", "1"]
    assert cells["fsdp2:mb8"] == ["1.0", "0 / 0", "0 / 0", "9000 / 300", "1"]
    assert "Visual tokens 50.0 %, ViT 25.0 % of the model FLOPs, 1000 tokens a step." in lines
    assert "A bf16 product of 8192^3 ran at 800 TFLOP/s on this GPU." in lines
