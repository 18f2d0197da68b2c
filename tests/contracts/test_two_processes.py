"""Every method under DDP: two processes, each with its own half of the batch, stay in step."""

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from letkd.batch import Batch
from letkd.progress import set_quiet
from tests.support.methods import METHODS
from tests.support.pair import a_distiller, a_stream


def half(batch: Batch, rank: int) -> Batch:
    return Batch(batch.x[rank::2], batch.y[rank::2], batch.index[rank::2], second=batch.second[rank::2])


def work(rank: int, where: str, out: str) -> None:
    torch.set_num_threads(1)
    set_quiet(True)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    finals = {}
    for name, make in METHODS.items():
        distiller = a_distiller(make()).fit(a_stream())
        model = DistributedDataParallel(distiller, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses = []
        for batch in a_stream():
            step = model(half(batch, rank))
            step.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss.detach())
        finals[name] = {"losses": torch.stack(losses)} | {key: p.detach() for key, p in distiller.named_parameters()}
    torch.save(finals, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_stay_in_step(tmp_path):
    spawn(work, args=(str(tmp_path / "meet"), str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one.keys() == set(METHODS)
    for name in one:
        losses = [finals[name].pop("losses") for finals in (one, two)]
        assert torch.isfinite(torch.stack(losses)).all(), name
        assert not torch.equal(*losses), f"{name}: both processes saw the same half"
        start = dict(a_distiller(METHODS[name]()).named_parameters())
        moved = [key for key, value in one[name].items() if not torch.equal(value, start[key])]
        assert moved, name
        for key, value in one[name].items():
            assert torch.equal(value, two[name][key]), f"{name}: {key}"
