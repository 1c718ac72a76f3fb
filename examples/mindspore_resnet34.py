"""ResNet-34, as in MindSpore's mixed-precision article, trained for some steps on random images at one level.

`python examples/mindspore_resnet34.py --policy O2:float16`. On a CPU, add `--size 32 --width 8 --batch 8 --steps 3`.
"""

import jax
import jax.numpy as jnp
import optax
import resnet
from _shared import Parser, policy, positive_int

import jamp


def main(argv: list[str] | None = None) -> list[float]:
    parser = Parser(prog="mindspore_resnet34.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy, default="O2:float16")
    parser.add_argument("--steps", type=positive_int, default=100)
    parser.add_argument("--batch", type=positive_int, default=64)
    parser.add_argument("--size", type=positive_int, default=224, help="height and width of the images")
    parser.add_argument("--width", type=positive_int, default=64, help="channels of the first convolution")
    args = parser.parse_args(argv)

    model = resnet.ResNet(depth=34, width=args.width)
    params, stats = resnet.init(model, 0, args.size)
    print(f"ResNet-34 with {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters at {args.policy}")
    tx = jamp.mixed_precision(optax.sgd(0.1, momentum=0.9), policy=args.policy)
    opt_state = tx.init(params)
    train_step = resnet.make_step(model, args.policy, tx)
    images = jax.random.normal(jax.random.key(1), (args.batch, args.size, args.size, 3))
    labels = jnp.arange(args.batch, dtype=jnp.int32) % model.classes
    losses = []
    for i in range(args.steps):
        params, stats, opt_state, loss = train_step(params, stats, opt_state, images, labels)
        losses.append(float(loss))
        if i % 10 == 0 or i == args.steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
