"""The contract that every sequence layer keeps, and the pieces the architectures are made of.

    y, state = layer(x, state, start)      # layer is an nn.Module, bound or through `apply`
    state = layer.initial_state(batch)     # needs no parameters: shapes, types and zeros
    layer.block                            # starts fall on its multiples; whole blocks are fast

- `x` [b n d] is a segment of a longer stream, `y` [b n d] what the layer makes of it.
- `state` is what the layer remembers: a pytree of arrays that all lead with the batch axis. State in and
  state out have the same tree, shapes and types.
- `start` [b n] is true at the first token of a document: there the layer puts its own initial state.
- A call whose length is a multiple of `block` takes the fast path, and its starts sit on multiples of
  `block`, counted from the call's first token. A call of any other length, one token included, is exact
  too, and takes starts anywhere.
- Dropout is on if and only if the caller supplies a "dropout" rng: there is no train or eval flag.
- Where one token at a time wants another layout, a layer has `for_decoding(state)` and `from_decoding(state)`, and
  takes and returns either form.
- Nothing here cuts gradients: the training step does, between segments, by taking the state as a constant.

`tests/laws` holds every layer to this.

The letters of shape comments:

    b  batch rows           h  heads                 f  feed-forward width
    n  tokens of a segment  k  head dimension        v  vocabulary
    w  window = block       s  state vectors         t  query tiles of a segment
    d  model width          q  queries of a tile     j  keys of a tile (= w + q)
"""
