"""The platform that a program is compiled for, which need not be this machine's."""

import jax


def platform() -> str:
    """The platform of the mesh in use, or the default one outside a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()
