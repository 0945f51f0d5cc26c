"""What a run saves comes back as it was."""

import jax
import jax.numpy as jnp
import numpy as np

from block_recurrent.checkpoints import Checkpoints


def test_a_state_without_a_number_in_it_comes_back(tmp_path):
    """The tail of a window of one token is one of no tokens."""
    params, training = {"w": jnp.ones(3)}, {"tail": jnp.zeros((2, 0, 3)), "inner": {"carry": jnp.arange(4.0)}}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), (params, training))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params, training, {"at": 5})
    checkpoints.wait()
    restored = checkpoints.restore(1, *like)
    checkpoints.close()
    assert restored[2] == {"at": 5}
    jax.tree.map(np.testing.assert_array_equal, restored[:2], (params, training))
    assert restored[1]["tail"].shape == (2, 0, 3) and restored[1]["tail"].sharding == here
