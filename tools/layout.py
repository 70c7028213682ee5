"""Shows the layout of a configuration: what each rank holds, and what the exchange of a training step moves.

    python tools/layout.py --config-name qwen35_mimo [--config-path FOLDER] [--step N] [section.key=value ...]

Nothing is started: the data's index and the configuration decide everything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from flagscale.config.errors import UserError  # noqa: E402
from flagscale.config.loading import load  # noqa: E402
from flagscale.data.loader import TRAIN, DataPipeline  # noqa: E402
from flagscale.data.macro import MacroBatchSpec  # noqa: E402
from flagscale.parallel.routes import (  # noqa: E402
    Consumer,
    Route,
    backward_routes,
    forward_routes,
    stays_in_replica,
)
from flagscale.plan.build import checked_plan  # noqa: E402
from flagscale.plan.layout import LANGUAGE, VISION  # noqa: E402
from flagscale.plan.plan import ExperimentPlan  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="layout.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="qwen35_mimo", metavar="NAME", help="YAML file, without .yaml")
    parser.add_argument("--config-path", "-cp", type=Path, metavar="FOLDER", help="folder of your own YAML files")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="iteration whose exchange is shown, from 0")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that win over the YAML files")
    arguments = parser.parse_intermixed_args(argv)
    try:
        folder = None if arguments.config_path is None else arguments.config_path.absolute()
        plan = checked_plan(load(arguments.config_name, folder, arguments.overrides))
        if not 0 <= arguments.step < plan.config.model.train_iters:
            last = plan.config.model.train_iters - 1
            raise UserError(f"--step {arguments.step}: the run has iterations 0 to {last}; name one of them")
        pipeline = DataPipeline(plan, TRAIN, rank=0)
        try:
            specs = pipeline.specs(arguments.step)
        finally:
            pipeline.close()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print("\n\n".join([rank_map(plan), *(exchange(plan, spec) for spec in specs)]))
    return 0


def rank_map(plan: ExperimentPlan) -> str:
    """A line a rank: its coordinates in both grids, and which embeddings it takes."""
    vision, language = plan.modules[VISION], plan.modules[LANGUAGE]
    lines = [
        f"{plan.layout}, {plan.world_size} ranks: ViT TP{vision.tp}/DP{vision.dp}, "
        f"LLM TP{language.tp}/PP{language.pp}/DP{language.dp}, vit_batch_factor {plan.batch.vit_batch_factor}",
        "",
        "rank  ViT tp dp  LLM tp pp dp  receives embeddings for",
    ]
    for rank in range(plan.world_size):
        seen = vision.coordinate(rank) if rank in vision else None
        encodes = f"{seen['tp']:>6} {seen['dp']:>2}" if seen else f"{'-':>6} {'-':>2}"
        place = language.coordinate(rank)
        uses = ["decoder"] if place["pp"] == 0 else []
        uses += ["MTP"] if place["pp"] == language.pp - 1 and plan.config.model.mtp_num_layers else []
        held = f"{place['tp']:>6} {place['pp']:>2} {place['dp']:>2}"
        lines.append(f"{rank:>4}  {encodes}  {held}  {', '.join(uses) or '-'}")
    return "\n".join(lines)


def exchange(plan: ExperimentPlan, spec: MacroBatchSpec) -> str:
    """Who encodes what of a macro batch, and the rows that go from rank to rank, there and, for what trains, back."""
    model = plan.config.model
    consumer = Consumer(
        seq_length=model.seq_length, sequence_parallel=model.sequence_parallel, mtp=model.mtp_num_layers > 0
    )
    grids = plan.modules[VISION], plan.modules[LANGUAGE]
    lines = [
        f"macro batch {spec.index}: {spec.num_microbatches} microbatches, {len(spec.items)} images, "
        f"encoder load max/mean {spec.load_max_over_mean:.3f}"
    ]
    for replica, indexes in enumerate(spec.encode):
        patches = sum(spec.items[index].num_patches for index in indexes)
        lines.append(f"  vision replica {replica} encodes {len(indexes)} images of {patches} patches")
    if stays_in_replica(*grids, plan.vision_balance):
        lines.append("  every image is encoded in the language replica that uses it: replicas exchange nothing")
    directions = [("embeddings", forward_routes)]
    if not (model.freeze_vision and model.freeze_merger):
        directions.append(("gradients", backward_routes))
    for title, rule in directions:
        lines += _matrix(title, rule(spec.items, spec.encode, *grids, consumer), plan)
    return "\n".join(lines)


def _matrix(title: str, routes: Sequence[Route], plan: ExperimentPlan) -> list[str]:
    """Rows from each rank (down) to each rank (across); what stays on its rank in brackets."""
    ranks = range(plan.world_size)
    rows = {(source, target): 0 for source in ranks for target in ranks}
    for route in routes:
        rows[route.source, route.target] += route.num_rows
    moved = sum(count for (source, target), count in rows.items() if source != target)
    size = plan.config.model.hidden_size * (2 if plan.config.system.bf16 else 4)
    lines = [f"  {title}: {moved} rows leave their rank, {moved * size} bytes", "  from \\ to" + _cells(ranks)]
    for source in ranks:
        counts = [f"[{rows[source, t]}]" if t == source else rows[source, t] or "." for t in ranks]
        lines.append(f"  {source:>9}" + _cells(counts))
    return lines


def _cells(values: Sequence[object]) -> str:
    return "".join(f"{value!s:>8}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
