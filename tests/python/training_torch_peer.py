#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training with PyTorch on Tutti: DDP and its modes, FSDP2, tensor parallel, pipelines, sharded optimizers and checkpoints compute what they compute on gloo."""
import itertools
import os
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from torch_ranks import LONG, Network, data, run_all, same, shimmed, train  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402

warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch is about to change


# ---- what ranks do; `gloo` is a group of the same ranks ----

class Branches(Network):
    """Uses one of two layers, by the step."""

    def __init__(self):
        super().__init__()
        self.steps = itertools.count()

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.third(torch.relu(self.second(x)) if next(self.steps) % 2 else x)


def data_parallel(rank, size, gloo):
    results = []
    for group in (None, gloo):
        model = nn.parallel.DistributedDataParallel(Network(), process_group=group, bucket_cap_mb=0.001)
        results.append((train(model, rank), [parameter.detach() for parameter in model.parameters()]))
    same(*results)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    for hook in (default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):  # collectives that start where others complete
        results = []
        for group in (None, gloo):
            model = nn.parallel.DistributedDataParallel(Network(), process_group=group)
            slim = hook is powerSGD_hook.powerSGD_hook
            model.register_comm_hook(powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1) if slim else group, hook)
            results.append(train(model, rank, 5))
        same(*results)
    for hook in [dist.BuiltinCommHookType.ALLREDUCE] + [dist.BuiltinCommHookType.FP16_COMPRESS] * shimmed():  # PyTorch's own in C++
        results = []
        for group in (None, gloo):
            model = nn.parallel.DistributedDataParallel(Network(), process_group=group)
            model._register_builtin_comm_hook(hook)
            results.append(train(model, rank))
        same(*results)


def modes_of_data_parallel(rank, size, gloo):
    for make, modes in ((Network, {"static_graph": True}), (Network, {"gradient_as_bucket_view": True}), (Branches, {"find_unused_parameters": True})):
        results = []
        for group in (None, gloo):
            model = nn.parallel.DistributedDataParallel(make(), process_group=group, bucket_cap_mb=0.001, **modes)
            results.append((train(model, rank, 4), [parameter.detach() for parameter in model.parameters()]))
        same(*results)
    results = []
    for group in (None, gloo):  # gradients of several batches before they meet
        model = nn.parallel.DistributedDataParallel(Network(), process_group=group)
        with model.no_sync():
            model(data(rank, (6, 8), torch.float32, 1)).square().mean().backward()
        model(data(rank, (6, 8), torch.float32, 2)).square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    same(*results)
    results = []
    for group in (None, gloo):  # ranks that have more batches than others
        model = nn.parallel.DistributedDataParallel(Network(), process_group=group)
        with model.join():
            losses = train(model, rank, 2 + rank)
        results.append((losses, [parameter.detach() for parameter in model.parameters()]))
    same(*results)


def fully_sharded(rank, size, gloo):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    results = []
    for mesh in (init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")):
        model = Network()
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results.append((train(model, rank), [parameter.full_tensor().detach() for parameter in model.parameters()]))
    same(*results)


def modes_of_fully_sharded(rank, size, gloo):
    """Narrow parameters, gradients of several batches, norms over all ranks, whole parameters kept for the backward pass."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    results = []
    for mesh in (init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")):
        model = Network()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not model.second)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        norms = []
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(data(rank, (6, 8), torch.float32, step).bfloat16()).float().square().mean().backward()
            if step % 2 == 1:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
                optimizer.step()
                optimizer.zero_grad()
        results.append((norms, [parameter.full_tensor().detach() for parameter in model.parameters()]))
    same(*results)


def divided_gradients(rank, size, gloo):
    """Gradients that are divided by a number of the program's instead of by that of the ranks: PyTorch multiplies them before they meet, which gloo cannot."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        found = []
        for mesh in (init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")):
            model = Network()
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            if not found:
                model.set_gradient_divide_factor(3.0)
            model(data(rank, (6, 8), torch.float32)).square().mean().backward()
            found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs * size / 3, rtol=rtol, atol=rtol / 100)


def sharded_in_copies(rank, size, gloo):
    """Shards in the rows of a mesh, copies in its columns."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    ranks = torch.arange(size).view(2, size // 2)
    columns, rows = [[dist.new_group(line.tolist(), backend="gloo", timeout=LONG) for line in lines] for lines in (ranks.t(), ranks)]
    beside = DeviceMesh.from_group([columns[rank % (size // 2)], rows[rank // (size // 2)]], "cpu", mesh=ranks, mesh_dim_names=("copies", "shards"))
    results = []
    for mesh in (init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")), beside):
        model = Network()
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results.append((train(model, rank), [parameter.full_tensor().detach() for parameter in model.parameters()]))
    same(*results)


def checkpoints(rank, size, gloo):
    """What sharded ranks have written together is read by whole ones, and the other way round."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    folder = os.environ["TEST_MEET"] + "-saved"
    model, whole, again = Network(), Network(), Network()
    for each in (model, again):
        fully_shard(each, mesh=init_device_mesh("cpu", (size,)))
    train(model, rank)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    read = get_model_state_dict(whole)
    checkpoint.load(read, checkpoint_id=folder)
    set_model_state_dict(whole, read)
    same([parameter.detach() for parameter in whole.parameters()], [parameter.full_tensor().detach() for parameter in model.parameters()])
    checkpoint.async_save(get_model_state_dict(whole), checkpoint_id=folder + "-whole", process_group=gloo).result()
    read = get_model_state_dict(again)
    checkpoint.load(read, checkpoint_id=folder + "-whole")
    set_model_state_dict(again, read)
    same(*[[parameter.to_local().detach() for parameter in each.parameters()] for each in (again, model)])


def sharded_optimizer(rank, size, gloo):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    results = []
    for group in (None, gloo):
        model = nn.parallel.DistributedDataParallel(Network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, process_group=group, lr=0.01, parameters_as_bucket_view=True)
        for step in range(3):
            optimizer.zero_grad()
            model(data(rank, (6, 8), torch.float32, step)).square().mean().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=size - 1)
        state = optimizer.state_dict()["state"] if rank == size - 1 else {}
        results.append(([parameter.detach() for parameter in model.parameters()], [state[i]["exp_avg"] for i in sorted(state)]))
    same(*results)


def pipelines(rank, size, gloo):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    whole, targets = data(0, (8, 16), torch.float32), data(1, (8, 16), torch.float32)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        results = []
        for group in (dist.group.WORLD, gloo):
            torch.manual_seed(rank)
            layer, losses = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), []
            stage = PipelineStage(layer, rank, size, torch.device("cpu"), group=group)
            runs = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
            if rank == 0:
                runs.step(whole)
            elif rank == size - 1:
                runs.step(target=targets, losses=losses)
            else:
                runs.step()
            results.append(([parameter.grad for parameter in layer.parameters()], [loss.detach() for loss in losses]))
        assert len(results[0][1]) == (4 if rank == size - 1 else 0)
        same(*results)


def tensors_and_meshes(rank, size, gloo):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    full = data(0, (size * 2, 6), torch.float32)
    mesh, other = init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")
    values = []
    for each in (mesh, other):
        sharded = distribute_tensor(full, each, [Shard(0)])
        across = sharded.redistribute(each, [Shard(1)])
        values.append([sharded.full_tensor(), across.to_local(), (sharded @ sharded.t()).redistribute(each, [Replicate()]).to_local(), sharded.sum().full_tensor()])
    same(*values)
    same(values[0][0], full)
    results = []
    for each in (mesh, other):
        model = parallelize_module(Network(), each, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        results.append(train(model, 0))
    same(*results)
    if size % 2 == 0:
        plane = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=plane.get_group("columns"))
        assert tensor.item() == 2


def compiled_training(rank, size, gloo):
    """Sharded layers and layers whose rows and columns are shared, compiled: what they compute uncompiled on gloo."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh, other = init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")

    def sharded(each):
        model = Network()
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=each)
        return fully_shard(model, mesh=each), rank

    def shared(each):
        return parallelize_module(Network(), each, {"first": ColwiseParallel(), "second": RowwiseParallel()}), 0
    for make, backend in ((sharded, "aot_eager"), (shared, "inductor")):
        results = []
        for each in (mesh, other):
            torch._dynamo.reset()
            model, rows = make(each)
            losses = train(torch.compile(model, backend=backend) if each is mesh else model, rows)
            results.append((losses, [getattr(parameter, "full_tensor", lambda: parameter)().detach() for parameter in model.parameters()]))
        same(*results)


if __name__ == "__main__":
    run_all([("data_parallel+modes_of_data_parallel+fully_sharded+modes_of_fully_sharded+divided_gradients+tensors_and_meshes+checkpoints+sharded_optimizer+pipelines+compiled_training", 2),
             ("data_parallel+tensors_and_meshes+modes_of_data_parallel+divided_gradients+sharded_in_copies+pipelines", 4)])
