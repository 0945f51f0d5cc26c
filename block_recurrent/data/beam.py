"""Building a store with Apache Beam, for a corpus that outgrows one machine: the steps of building.py as one pipeline.

The work folder must be one that all of Beam's workers see: any folder with the DirectRunner, a bucket elsewhere. The
bytes are those of the local build; steps that are in the work folder are not done again. requirements-beam.txt is an
environment of its own, since Beam and TensorFlow want different versions of protobuf.
"""

import functools
from typing import Any

from block_recurrent.data import building, pool
from block_recurrent.data.building import Recipe
from block_recurrent.data.store import Store, store_in
from block_recurrent.errors import UserError


def build(recipe: Recipe, about: dict[str, Any], output: str, arguments: list[str]) -> Store:
    """Runs the pipeline with Beam's own arguments ("--runner=DirectRunner", ...) and moves the store to `output`."""
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(
            "Apache Beam is not installed: pip install -r requirements-beam.txt, in its own venv"
        ) from error

    options = PipelineOptions(arguments, save_main_session=False)
    try:
        with beam.Pipeline(options=options) as pipeline:
            describe(pipeline, recipe)
    except Exception as error:  # what a worker raised comes wrapped in the runner's own errors
        told = [line for line in str(error).splitlines() if "UserError: " in line]
        if told:
            raise UserError(told[-1].partition("UserError: ")[2].partition(" [while running")[0]) from error
        raise
    building.finish(recipe, building.settle(recipe), about)
    pool.publish(recipe, output)
    return store_in(output)


def describe(pipeline: Any, recipe: Recipe) -> None:
    """The pipeline: fragments where documents are scattered, then units, then shards, each after all of the last."""
    import apache_beam as beam

    def each(name: str, items: Any, function: Any) -> Any:
        return items | f"spread {name}" >> beam.Reshuffle() | name >> beam.Map(functools.partial(function, recipe))

    def after(name: str, done: Any, items: Any) -> Any:
        """The items that a function gives once everything in `done` is."""
        waiting = beam.pvalue.AsList(done)
        once = pipeline | f"begin {name}" >> beam.Create([None])
        return once | f"plan {name}" >> beam.FlatMap(lambda _, __: items(recipe), waiting)

    if recipe.scattered:
        units = pipeline | "units" >> beam.Create(range(len(recipe.units)))
        gathered = each("gather fragments", units, building.scatter_unit)
        pieces = after("documents", gathered, numbers)
    else:
        pieces = pipeline | "units" >> beam.Create(range(recipe.pieces))
    read = each("read documents", pieces, building.read_unit)
    each("write shards", after("shards", read, shards), building.write_shard)


def numbers(recipe: Recipe) -> range:
    return range(recipe.pieces)


def shards(recipe: Recipe) -> list[building.Shard]:
    return [shard for some in building.settle(recipe).shards.values() for shard in some]
