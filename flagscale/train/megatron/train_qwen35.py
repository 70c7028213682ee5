"""The entrypoint torchrun starts on every rank: `train_qwen35.py --plan exp_dir/plan.json`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.plan.plan import ExperimentPlan


def main() -> int:
    """Trains as the plan says; returns the exit code."""
    # Here and not above: each process that writes a checkpoint imports this file again.
    from flagscale.light import light_imports

    with light_imports():
        import torch.distributed as dist

        from flagscale.platforms import get_platform
        from flagscale.train.build import build
        from flagscale.train.failure import leave_if_explained, report_user_error
        from flagscale.train.loop import Training
        from flagscale.train.place import Place, log_folder
        from flagscale.train.rendezvous import rendezvous

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json written by run.py")
    exp_dir = parser.parse_args().plan.resolve().parent
    plan = ExperimentPlan.load(exp_dir / "plan.json")
    platform = get_platform(plan.config.system.platform)
    platform.install()
    device = platform.device if platform.device.type == "cuda" else None
    dist.init_process_group(platform.backend, device_id=device, **rendezvous())
    place, state = Place(log_folder(), plan.config), None
    try:
        state = build(plan, platform, place)
        with Training(state, exp_dir) as training:
            training.run()
        dist.barrier()
    except UserError as error:
        report_user_error(exp_dir, dist.get_rank(), error)
        # Peers may wait in a collective that never completes: leave without them, torchrun ends the job.
        os._exit(2)
    except BaseException as error:
        leave_if_explained(error, place, plan.config)
        raise
    finally:
        if state is not None:
            state.topology.destroy()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
