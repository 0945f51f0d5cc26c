"""What a run saves comes back as it was."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.checkpoints import Checkpoints, ending_reads
from block_recurrent.errors import UserError


def saved(folder, step: int, params, training) -> tuple[Checkpoints, list]:
    """One checkpoint, and the trees of shapes to restore it with."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, params, training, {"at": 5})
    checkpoints.wait()
    like = [
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), t) for t in (params, training)
    ]
    return checkpoints, like


def test_a_state_without_a_number_in_it_comes_back(tmp_path):
    """The tail of a window of one token is one of no tokens."""
    params, training = {"w": jnp.ones(3)}, {"tail": jnp.zeros((2, 0, 3)), "inner": {"carry": jnp.arange(4.0)}}
    checkpoints, like = saved(tmp_path, 1, params, training)
    restored = checkpoints.restore(1, *like)
    checkpoints.close()
    assert restored[2] == {"at": 5}
    jax.tree.map(np.testing.assert_array_equal, restored[:2], (params, training))
    assert restored[1]["tail"].shape == (2, 0, 3) and restored[1]["tail"].sharding == like[1]["tail"].sharding


def test_an_array_that_cannot_be_read_is_told_with_its_cause(tmp_path):
    arrays = {f"w{i}": jax.random.normal(jax.random.key(i), (64, 64)) for i in range(8)}
    checkpoints, like = saved(tmp_path, 1, arrays, {"n": jnp.ones(3)})
    for file in (tmp_path / "1/params/ocdbt.process_0/d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"/1 is damaged \(") as told:
        checkpoints.restore(1, *like)
    checkpoints.close()
    assert "TensorStore details" not in str(told.value), "Orbax's wrapping, which hides the cause"


def test_reads_under_way_end_before_the_loop_of_one_that_failed_closes():
    ended = []

    async def slow():
        await asyncio.sleep(0.1)
        ended.append(True)

    async def damaged():
        await asyncio.sleep(0)
        raise OSError("truncated")

    async def both():
        await asyncio.gather(slow(), damaged())

    with ending_reads():
        loop = asyncio.new_event_loop()  # as Orbax makes and closes it
        with pytest.raises(OSError, match="truncated"):
            loop.run_until_complete(both())
        assert not ended
        loop.close()
        assert ended
    assert type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy
