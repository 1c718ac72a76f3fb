"""The numbers that decide where a rule begins or ends, each with the measurement that set it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heuristics:
    """Thresholds of planning and keeping. docs/design/ has the measurements; `benchmarks` sweeps them.

    Attributes:
        statistic: What is this part of data or less is a statistic of it; anything larger is data. Group norms of eight
            groups have statistics of an eighth at the least.
        short_phase: Contracted elements up to which a product that is read as a phase may be a map of coordinates. A
            matrix unit takes 16 at once, so that half precision would not make it faster either.
        short: The same for products of float32 operands whoever reads them: the dimensions of space, of rotations,
            cells and cameras. Of one less (a plane) and one more (homogeneous coordinates) if the program puts the
            matrix or the points together.
        tallest: Rows for each column that a matrix which takes differences may have: those along three axes of a grid,
            or along the edges of a graph. What is taller are coordinates, or other data that the program makes.
        coordinates: Arguments that are multiplied this many at a time may be times, or coordinates of space; more are
            a layer's inputs.
        far: Numbers from which on what they are added to is float32. Data of the order of one loses three digits there:
            a standard deviation of features around 50 was 12 times as far off as careful code's.
        part: Numbers from which on what they are added to is float32 where a reader takes as much off again.
            Smaller ones are epsilons.
        small_step: The largest number by which what is added to a carry is scaled, if it is a step of a rule that
            learns, and no layer: residual networks that scale their branches do so by 0.1 to 0.3.
        many_readers: Elements that one element of half data is given to, from which on their cotangents add up in
            float32. In bfloat16 the gradient of a row with 20,000 readers was wrong by 98.7 %.
        most_scalings: Scalings in a row that are done again for a float32 sum. Of a longer row, a decay, each of many
            sums would do all of it again.
        longest: Elementwise operations in a row that are computed again from kept values. More would be long kernels,
            and in a float32 sum over time steps a kernel for each term that adds all terms before it once more: 100
            Euler steps took 7.7 s to compile, and 2.0 s with this.
        segment: Steps under one checkpoint. When JAX looked every residual up among all equations of one, quadratic in
            their number, 48 transformer blocks under one took 1.5 times as long to trace.
        state: A float32 state of a loop that is this many times smaller than what its body keeps is kept as it is, and
            not in half, such as where a ray is: the gradient of 40 steps along one was up to 5 times as far off as
            careful code's. What a recurrent net carries is not so small beside its gates.
        repeated: Steps from which on layers that repeat are under a checkpoint each, so that they are traced once. Of
            12 layers of 9 steps the gradient takes 51 ms to trace in place of 90, of 3 layers 28 in place of 26.
        crossing: Layers that repeat are cut apart where the bytes that are kept for that alone are this many times less
            than what their products make.
        tiles: What is read by a product whose result is this many times larger, as logits are, is computed before it.
            XLA:TPU would compute it anew for each tile of the result, such as the normalization in front of a head.
        readers: Readers of a cast whose cotangents may add up in half, before the cast turns the sum to float32. In 48
            steps of an unrolled RNN that would double the error of its gradient.
        small_beside: Half copies of weights are made in front of a checkpoint, and kept, where they are this many times
            smaller than what the products in it make.
        float8_least: Rows, columns and contracted elements that a product has at least for 8 bits to be chosen. The
            matrix unit of an H100 takes 64 rows at once, and what multiplies fewer reads memory most of the time: there
            the passes that find the scales and round cost more than a product that is twice as fast saves.
        float8_rows: The longer side of a weight is less than this many times the rows that it multiplies, or to find
            its scale and to round it costs more than 8 bits save. Of three layers of 4096 at batch 512 a train step
            moved 1.21 times the bytes of bfloat16, compiled for an H100: at its bandwidth 38 us a layer, where products
            at twice the rate save 26 us. Of GPT-2 at 8192 rows it moved 1.05 times: 1.1 ms, where they save 2.1 ms. (On
            an H100 that step took 7.8 ms more with them. Which kernels are slower than these bytes say is not known.)
        float8_enough: Rows from which on 8 bits save more than that, however large the weight is. The same bytes are
            7.6 for each element of the weight, and take 2.3 ps; its three products save 3 ps for each 1000 rows.
        float8_multiple: What all three are multiples of in a product in 8 bits. cuBLASLt takes no others.
        float8_convolution: Numbers of its kernel by which a convolution multiplies each number of its data, from which
            on 8 bits are chosen. Of three with 3 x 3 x 256 = 2304 a train step moved 1.85 times the bytes of bfloat16,
            compiled for an H100: at its bandwidth 28 us for each product, where twice the rate saves 32 us.
    """

    statistic: int = 8
    short_phase: int = 8
    short: int = 3
    tallest: int = 4
    coordinates: int = 3
    far: float = 8.0
    part: float = 0.5
    small_step: float = 0.05
    many_readers: int = 8
    most_scalings: int = 4
    longest: int = 32
    segment: int = 256
    state: int = 32
    repeated: int = 8
    crossing: int = 16
    tiles: int = 16
    readers: int = 4
    small_beside: int = 4
    float8_least: int = 64
    float8_rows: int = 8
    float8_enough: int = 1024
    float8_multiple: int = 16
    float8_convolution: int = 4096


DEFAULT = Heuristics()
