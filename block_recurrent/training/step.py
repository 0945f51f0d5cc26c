"""One training step: from a batch to updated parameters, in one file and one compiled function."""

import re
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from block_recurrent.device_memory import require_room
from block_recurrent.errors import UserError
from block_recurrent.layers.health import COLLECTION, measures_of
from block_recurrent.training.optimizers import Optimizer, layer_by_layer
from block_recurrent.training.sharding import BATCH, in_mesh, named, optimizer_specs, parameter_specs

Batch = dict[str, jax.Array]  # inputs, targets, weights, start: each [b n], the first two [b n record] where it is one


@flax.struct.dataclass
class TrainState:
    """Everything a step changes."""

    step: jax.Array
    params: Any
    optimizer: Any
    memory: Any  # the model's carried state, one row per row of the batch
    rng: jax.Array


class Trainer:
    """A model and an optimizer compiled over a mesh: `state = init(seed)`, `state, metrics = step(state, batch)`.

    Over an abstract mesh there are shapes, shardings and a traced step, but nothing runs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: Mesh | AbstractMesh,
        rows: int,
        accumulate: int = 1,
        health: bool = False,
    ):
        self.model, self.mesh, self.rows = model, mesh, rows
        boxed = boxed_params(model)
        params = nn.unbox(boxed)
        depths = jax.tree.map(depth_of, boxed, is_leaf=is_boxed)
        transformation = layer_by_layer(optimizer.transformation, depths)
        specs = parameter_specs(boxed, mesh)
        state_specs = TrainState(
            step=PartitionSpec(),
            params=specs,
            optimizer=optimizer_specs(transformation, params, specs),
            memory=jax.tree.map(lambda _: BATCH, jax.eval_shape(lambda: model.initial_state(rows))),
            rng=PartitionSpec(),
        )
        self.shardings = named(mesh, state_specs)
        self.batch_sharding = named(mesh, BATCH)
        replicated = named(mesh, PartitionSpec())

        def init(seed: jax.Array) -> TrainState:
            params_key, rng = jax.random.split(jax.random.key(seed))
            params = nn.unbox(init_params(model, params_key))
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                optimizer=transformation.init(params),
                memory=model.initial_state(rows),
                rng=jax.random.key_data(rng),
            )

        self._init = jax.jit(init, out_shardings=self.shardings)
        self._step = jax.jit(
            make_step(model, optimizer, transformation, accumulate, health),
            in_shardings=(self.shardings, self.batch_sharding, replicated),
            out_shardings=(self.shardings, replicated),
            donate_argnums=0,
        )

    def initial_memory(self, rows: int | None = None) -> Any:
        """What every row remembers before its first token, where the training state has it."""
        return jax.jit(lambda: self.model.initial_state(rows or self.rows), out_shardings=self.shardings.memory)()

    def init(self, seed: int) -> TrainState:
        with in_mesh(self.mesh):
            try:
                return jax.block_until_ready(self._init(seed))
            except jax.errors.JaxRuntimeError as error:
                told = re.search(r"UserError: (.+)", str(error))  # of a file that parameters begin with
                if told is None:
                    raise
                raise UserError(told[1]) from error

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the train state, for restoring one."""
        shapes = jax.eval_shape(self._init, 0)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.shardings)

    def abstract_batch(self, segment: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and sharding of a batch of segments of so many tokens."""
        position = jax.eval_shape(lambda: self.model.blank(self.rows, segment))
        shapes = {"inputs": position, "targets": position}
        shapes |= {"weights": position.update(shape=(self.rows, segment), dtype=jnp.float32)}
        shapes |= {"start": shapes["weights"].update(dtype=jnp.bool_)}
        return {name: shape.update(sharding=self.batch_sharding) for name, shape in shapes.items()}

    def require_room(self, segment: int) -> None:
        """Refuses a run that the devices have no room for; what the layers compute with comes on top of this."""
        state = self.abstract_state()
        require_room(
            "take fewer rows, a smaller segment or model, or more devices",
            parameters=state.params,
            gradient=state.params,
            optimizer=state.optimizer,
            carried_state=state.memory,
            batch=self.abstract_batch(segment),
        )

    def step(self, state: TrainState, batch: Batch, scale: float = 1.0) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes this process's rows of the batch, and what the learning rate is multiplied by; donates `state`."""
        with in_mesh(self.mesh):
            return self._step(state, self.place(batch), np.float32(scale))

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """The step as a traced program, also of shapes alone: to count, lower or compile without running it."""
        with in_mesh(self.mesh):
            return self._step.trace(state, self.place(batch), np.float32(1.0))

    def local_rows(self, rows: int | None = None) -> tuple[int, ...]:
        """The rows of the global batch, or of one of so many, that live on this process's devices: those it reads."""
        every = range(rows or self.rows)
        mine = self.batch_sharding.addressable_devices_indices_map((len(every),)).values()
        return tuple(sorted({row for (part,) in mine for row in every[part]}))

    def place(self, batch: Batch) -> Batch:
        """Puts this process's rows on its devices, as part of the global batch; what is there already stays."""
        return {
            name: rows
            if isinstance(rows, jax.Array | jax.ShapeDtypeStruct)
            else jax.make_array_from_process_local_data(self.batch_sharding, rows)
            for name, rows in batch.items()
        }


def init_params(model: nn.Module, key: jax.Array):
    """Fresh parameters, boxed with the names of their axes."""
    start = jnp.zeros((1, model.block), bool)
    return model.init(key, model.blank(1, model.block), model.initial_state(1), start)["params"]


def boxed_params(model: nn.Module):
    """Shapes and types of the parameters, boxed with the names of their axes."""
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def depth_of(parameter: Any) -> int:
    """How many equal layers share a parameter, 0 where it is one layer's own; a layer's may be without names."""
    return parameter.value.shape[0] if is_boxed(parameter) and parameter.names[:1] == ("layers",) else 0


def is_boxed(value: Any) -> bool:
    return isinstance(value, nn.Partitioned)


def make_loss(model: nn.Module, health: bool) -> Callable:
    """The loss of a batch as a function of the parameters: its value, and (carried memory, what the layers told)."""

    def loss(params, memory, batch: Batch, key: jax.Array, total: jax.Array):
        # `memory` is not trained: this is the one place where gradients are cut between segments.
        (losses, memory), sown = model.apply(
            {"params": params},
            batch["inputs"],
            batch["targets"],
            memory,
            batch["start"],
            rngs={"dropout": key},
            method="losses",
            mutable=[COLLECTION] if health else [],
        )
        return jnp.sum(losses * batch["weights"]) / total, (memory, sown)

    return loss


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    transformation: optax.GradientTransformation,
    accumulate: int,
    health: bool,
) -> Callable:
    """The step as a pure function of (state, batch, scale), its rows taken in `accumulate` parts.

    The learning rate is multiplied by `scale`. With `health` its metrics tell how the recurrent states fare.
    """

    loss = make_loss(model, health)

    def gradient_of(params, memory, batch: Batch, key: jax.Array, total: jax.Array):
        """Value, carried memory, measures of health, gradient."""
        if not health:
            (value, (memory, _)), gradient = jax.value_and_grad(loss, has_aux=True)(params, memory, batch, key, total)
            return value, memory, {}, gradient
        with_memory = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
        (value, (memory, sown)), (gradient, into_memory) = with_memory(params, memory, batch, key, total)
        return value, memory, measures_of(sown, into_memory, batch["start"]), gradient

    def step(state: TrainState, batch: Batch, scale: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        if accumulate == 1:
            value, memory, measures, gradient = gradient_of(state.params, state.memory, batch, key, total)
        else:

            def add_part(so_far, part):
                value, memory, measures, gradient = gradient_of(state.params, *part, total)
                return jax.tree.map(jnp.add, so_far, (value, gradient)), (memory, measures)

            parts = (
                split_rows(state.memory, accumulate),
                split_rows(batch, accumulate),
                jax.random.split(key, accumulate),
            )
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            (value, gradient), (memory, measures) = jax.lax.scan(add_part, zeros, parts)
            memory, measures = join_rows(memory), jax.tree.map(jnp.mean, measures)
        gradient_norm = optax.tree.norm(gradient)
        if optimizer.clip is not None:
            shrink = jnp.minimum(1.0, optimizer.clip / jnp.maximum(gradient_norm, 1e-30))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        updates, optimizer_state = transformation.update(gradient, state.optimizer, state.params)
        updates = jax.tree.map(lambda u: u * scale, updates)
        metrics = {
            "loss": value,
            "gradient_norm": gradient_norm,
            "update_norm": optax.tree.norm(updates),
            "learning_rate": optimizer.learning_rate(state.step) * scale,
            "tokens": jnp.sum(batch["weights"]),
            **measures,
        }
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer_state,
            memory=memory,
            rng=state.rng,
        )
        return new, metrics

    return step


def split_rows(tree, parts: int):
    """[b ...] to [parts b/parts ...]: neighbouring rows go to different parts, so each part stays on all devices."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree):
    """The inverse of split_rows."""
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), tree)
