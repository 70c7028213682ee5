"""The CPU platform's kernels and optimizer against plain formulas, and how a platform is chosen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flagscale.config.errors import UserError
from flagscale.platforms import get_platform
from flagscale.platforms.cpu_adam import CpuFusedAdam
from flagscale.platforms.cuda import check_cudnn, check_delta_rule, check_triton, communication_settings, peak_flops
from flagscale.platforms.torch_kernels import (
    RAW_INPUTS,
    causal_conv1d,
    chunk_gated_delta_rule,
    gated_delta_rule,
    l2norm,
)
from tests.dist.pool import Pool, run_ranks

LENGTHS = [5, 64, 1, 131]


def borders() -> Tensor:
    """Of the packed sequences."""
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def rule_inputs(tokens: int) -> dict[str, Tensor]:
    """q, k, v, g, beta of a batch of one, with gradients, in double precision's place where the kernel casts."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 3, size, generator=generator) for size in (8, 8, 6))
    g = -torch.rand(1, tokens, 3, generator=generator)
    beta = torch.rand(1, tokens, 3, generator=generator)
    return {name: x.requires_grad_() for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()}


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token, from its definition."""
    k = l2norm(k)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], wrong)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[3] ** -0.5)
    return torch.stack(out, 1)


def gradients(out: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Of a sum that weighs every output differently."""
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), list(inputs.values())))


@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
def test_chunked_rule_is_the_recurrence(tokens: int) -> None:
    inputs = rule_inputs(tokens)
    chunked = gated_delta_rule(**{**inputs, "k": l2norm(inputs["k"])})
    expected = recurrent(**inputs)
    torch.testing.assert_close(chunked, expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(gradients(chunked, inputs), gradients(expected, inputs), strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def test_packed_rule_keeps_sequences_apart() -> None:
    inputs = rule_inputs(sum(LENGTHS))
    packed = gated_delta_rule(**{**inputs, "k": l2norm(inputs["k"])}, cu_seqlens=borders())
    parts = zip(*(x.split(LENGTHS, dim=1) for x in inputs.values()), strict=True)
    expected = torch.cat([recurrent(*part) for part in parts], 1)
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(gradients(packed, inputs), gradients(expected, inputs), strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def test_the_rule_takes_what_a_layer_projects() -> None:
    """Two value heads to a key head; every formula written out by head."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 70, 2, 8, generator=generator) for _ in range(2))
    v = torch.randn(1, 70, 4, 6, generator=generator)
    g, beta = (torch.randn(1, 70, 4, generator=generator) for _ in range(2))
    A_log, dt_bias = torch.randn(4, generator=generator), torch.randn(4, generator=generator)
    out = chunk_gated_delta_rule(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **RAW_INPUTS)[0]
    for head in range(4):
        one = slice(head, head + 1)
        query, key = (x[:, :, head // 2, None] / (x[:, :, head // 2, None].norm(dim=-1, keepdim=True)) for x in (q, k))
        decay = -(A_log[head].exp()) * (1 + (g[..., one] + dt_bias[head]).exp()).log()
        expected = recurrent(query, key, v[:, :, one], decay, 1 / (1 + (-beta[..., one]).exp()))
        torch.testing.assert_close(out[:, :, one], expected, atol=1e-5, rtol=1e-5)


def test_packed_convolution_keeps_sequences_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), 6, generator=generator)
    weight, bias = torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)
    packed = causal_conv1d(x, weight, bias, "silu", cu_seqlens=borders())[0]
    alone = [causal_conv1d(part, weight, bias, "silu")[0] for part in x.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    first_two = torch.stack((weight[:, 3] * x[0, 5], weight[:, 3] * x[0, 6] + weight[:, 2] * x[0, 5])) + bias
    torch.testing.assert_close(packed[0, 5:7], torch.nn.functional.silu(first_two))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torch(decoupled: bool) -> None:
    start = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    fused = CpuFusedAdam([mine], **options, adam_w_mode=decoupled)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **options)
    for step in range(5):
        for param, optimizer in ((mine, fused), (theirs, plain)):
            param.grad = (param.detach() - step).cos()
            optimizer.step()
    torch.testing.assert_close(mine, theirs)
    assert fused.state_dict()["param_groups"][0]["step"] == 5


def shim_answers() -> dict[str, object]:
    """What Megatron-Core meets on a rank of the CPU platform, installed twice."""
    platform = get_platform("auto")
    platform.install()
    once = (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    platform.install()
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(1)
    torch.cuda.set_rng_state(state)
    return {
        "twice": once == (torch.zeros, torch.Tensor.type, torch.cuda.current_device),
        "device": str(torch.ones(2, device="cuda").device),
        "type": torch.ones(2).type(),
        "cast": torch.ones(2).type(torch.int64).dtype == torch.int64,
        "repeats": bool(torch.rand(1) == first),
        "name": platform.name,
    }


def test_the_cpu_answers_for_cuda() -> None:
    answers = run_ranks(1, shim_answers)[0]
    expected = {"twice": True, "device": "cpu", "type": "torch.cuda.FloatTensor", "cast": True, "repeats": True}
    assert answers == {**expected, "name": "cpu"}


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A800-SXM4-80GB", 312e12), ("NVIDIA T4", None)],
)
def test_peak_follows_from_the_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_settings_of_communication_are_reported() -> None:
    environment = {"NCCL_NVLS_ENABLE": "0", "PATH": "/bin", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_HOME": "/usr"}
    assert communication_settings(environment) == "CUDA_DEVICE_MAX_CONNECTIONS=1, NCCL_NVLS_ENABLE=0"


def test_cuda_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"system\.platform"):
        get_platform("cuda")


def test_a_mixture_of_two_cudnn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0) but found (9, 14, 0). More")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    with pytest.raises(UserError, match=r"found \(9, 14, 0\); gradients .* CUDNN_HOME"):
        check_cudnn()


def test_every_part_of_torch_s_cudnn_is_loaded_before_transformer_engine(tmp_path: Path) -> None:
    """By importing a package that imports it; nothing is, where there is no Transformer Engine."""
    library = tmp_path / "nvidia/cudnn/lib/libcudnn_part.so.9"
    library.parent.mkdir(parents=True)
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for package, engine in itertools.product(("train", "models"), (False, True)):
        if engine:
            (tmp_path / "transformer_engine").mkdir()
        show = f"import flagscale.{package}, sys; print(open('/proc/self/maps').read(), 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
        assert (str(library) in done.stdout) == engine
        assert done.stdout.split()[-1] == "False"
        if engine:
            (tmp_path / "transformer_engine").rmdir()


@pytest.mark.parametrize(
    ("triton", "capability", "refused"),
    [
        ("3.4.0", (9, 0), True),
        ("3.7.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.8.0+git1", (9, 0), False),
        ("3.3.1", (9, 0), False),
        ("3.5.0", (8, 0), False),
        (None, (9, 0), False),
    ],
)
def test_triton_with_wrong_gradients_is_refused_on_hopper(
    triton: str | None, capability: tuple[int, int], refused: bool
) -> None:
    if refused:
        with pytest.raises(UserError, match=r"triton>=3\.7\.1"):
            check_triton("0.6.0", triton, capability)
    else:
        check_triton("0.6.0", triton, capability)


def test_tuned_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what comes after is not tested here
    for given, expected in ((None, "1"), ("0", "0")):
        monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
        if given is not None:
            monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", given)
        with pytest.raises(UserError, match="sees no GPU"):
            get_platform("cuda")
        assert os.environ["TRITON_CACHE_AUTOTUNING"] == expected


def network_threads() -> int:
    """Threads of this rank that wait for gloo's network, once there are many groups that have all been used."""
    for _ in range(5):
        group = dist.new_group(list(range(dist.get_world_size())))
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0, 2.0, 2.0]
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def install_and_count() -> int:
    """The same with the CPU platform; the group of the pool exists before it."""
    get_platform("cpu").install()
    return network_threads()


def test_process_groups_share_a_network_thread() -> None:
    """One for all groups made since; the pool's own groups have one each."""
    pool = Pool()
    try:
        with pool.session(2) as run:
            first = run(install_and_count)
            assert run(install_and_count) == first
    finally:
        pool.end()


@pytest.mark.parametrize("fla", ["0.5.1", "0.7.0", "1.0"])
def test_another_delta_rule_is_refused(fla: str) -> None:
    check_delta_rule("0.6.0")
    with pytest.raises(UserError, match=rf"flash-linear-attention {fla}: .*install flash-linear-attention==0.6.0"):
        check_delta_rule(fla)
