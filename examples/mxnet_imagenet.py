"""MXNet's 90-epoch ImageNet recipe for ResNet-50 v1 in float16, for a folder of images.

`python examples/mxnet_imagenet.py /data/imagenet --save resnet50.msgpack`, where the folder has `train` and, to print
the accuracy after each epoch, `val`, both with one subfolder a class. The recipe is that of MXNet's float16 tutorial:
batches of 1024 at a learning rate of 0.4, divided by 10 after epochs 30, 60 and 80, multi-precision SGD with momentum.
The tutorial reports 76.34 % top-1 with it, and 76.18 % in float32.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import resnet
from _shared import Parser, positive_int, weights_path
from PIL import Image
from rich.progress import track

import jamp

# Mean and standard deviation of ImageNet's red, green and blue, of values from 0 to 1.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
READERS = 16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The tutorial's settings."""

    epochs: int = 90
    batch: int = 1024
    learning_rate: float = 0.4
    decay: float = 0.1
    decay_after_epochs: tuple[int, ...] = (30, 60, 80)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    loss_scale: float = 128.0
    policy: str = "O2:float16"
    size: int = 224
    width: int = 64

    def optimizer(self, steps_per_epoch: int) -> optax.GradientTransformation:
        """Returns multi-precision SGD: float32 master weights inside, the static loss scale outside."""
        boundaries = {epoch * steps_per_epoch: self.decay for epoch in self.decay_after_epochs}
        schedule = optax.piecewise_constant_schedule(self.learning_rate, boundaries)
        sgd = optax.chain(optax.add_decayed_weights(self.weight_decay), optax.sgd(schedule, self.momentum))
        return jamp.loss_scaled(jamp.StaticLossScale(self.loss_scale), inner=jamp.master_weights(sgd))


def find_classes(folder: pathlib.Path) -> list[str]:
    """Returns the names of the classes, which are the subfolders in order."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def find_images(folder: pathlib.Path, classes: list[str]) -> tuple[list[pathlib.Path], np.ndarray]:
    """Returns the image files of the classes that the folder has, and their labels; other files are passed over."""
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    ]
    return [path for path, _ in files], np.array([label for _, label in files], np.int32)


def read_image(path: pathlib.Path, size: int, seed: int | None) -> np.ndarray:
    """Returns a square of an image as normalized float32 of shape (size, size, 3).

    With a seed, the square is random and sometimes mirrored. Without, it is the middle one of 7/8 of the shorter side.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    with Image.open(path) as image:
        image = image.convert("RGB")
        side = min(image.size) * (7 / 8 if rng is None else rng.uniform(0.3, 1.0) ** 0.5)
        room = np.array(image.size) - side
        left, top = room / 2 if rng is None else rng.uniform(0, room)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        pixels = (np.asarray(image, np.float32) / 255 - MEAN) / STD
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels


def read_batches(files, labels, chunks, size: int, rng=None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a batch for each array of indices in `chunks`; a pool of threads reads the next one meanwhile."""
    with ThreadPoolExecutor(READERS) as pool:

        def submit(chunk):
            seeds = [None] * len(chunk) if rng is None else rng.integers(2**32, size=len(chunk))
            return [pool.submit(read_image, files[i], size, seed) for i, seed in zip(chunk, seeds, strict=True)]

        pending = submit(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], ()], strict=True):
            ready, pending = pending, submit(following)
            yield np.stack([image.result() for image in ready]), labels[chunk]


def training_batches(files, labels, recipe: Recipe, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the shuffled whole batches of one epoch."""
    rng = np.random.default_rng(epoch)
    order = rng.permutation(len(files))
    chunks = [order[i : i + recipe.batch] for i in range(0, len(order) - recipe.batch + 1, recipe.batch)]
    return read_batches(files, labels, chunks, recipe.size, rng)


def make_top1(model: resnet.ResNet, recipe: Recipe) -> Callable:
    """Returns `top1(params, stats, files, labels)`, the share of images whose class has the largest logit."""

    def forward(params, stats, images):
        return model.apply({"params": params, "batch_stats": stats}, images, train=False)

    logits = jax.jit(jamp.cast_fn(forward, recipe.policy))

    def top1(params, stats, files, labels) -> float:
        chunks = np.split(np.arange(len(files)), range(recipe.batch, len(files), recipe.batch))
        batches = read_batches(files, labels, chunks, recipe.size)
        return sum(int((logits(params, stats, x).argmax(-1) == y).sum()) for x, y in batches) / len(files)

    return top1


def train(folder: pathlib.Path, recipe: Recipe, save: pathlib.Path | None = None) -> list[float]:
    """Runs the recipe and returns the mean training loss of every epoch; after each, validates and saves."""
    classes = find_classes(folder / "train")
    files, labels = find_images(folder / "train", classes)
    validation = find_images(folder / "val", classes)
    steps_per_epoch = len(files) // recipe.batch
    model = resnet.ResNet(depth=50, classes=len(classes), width=recipe.width)
    params, stats = resnet.init(model, 0, recipe.size)
    params = jamp.half_params(params, jamp.get_policy(recipe.policy).compute_dtype)
    tx = recipe.optimizer(steps_per_epoch)
    opt_state = tx.init(params)
    step = resnet.make_step(model, recipe.policy, tx)
    top1 = make_top1(model, recipe)
    means = []
    for epoch in range(recipe.epochs):
        losses = []
        batches = training_batches(files, labels, recipe, epoch)
        for batch in track(batches, f"epoch {epoch + 1} of {recipe.epochs}", total=steps_per_epoch):
            params, stats, opt_state, loss = step(params, stats, opt_state, *batch)
            losses.append(loss)
        means.append(float(jnp.stack(losses).mean()))
        accuracy = f", validation top-1 {top1(params, stats, *validation):.2%}" if validation[0] else ""
        print(f"epoch {epoch + 1}: mean loss {means[-1]:.4f}{accuracy}")
        if save is not None:
            masters = jamp.master_params(opt_state, params)
            save.write_bytes(flax.serialization.to_bytes((masters, stats)))
    return means


def main(argv: list[str] | None = None) -> list[float]:
    parser = Parser(prog="mxnet_imagenet.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="with train, and val if you like, of one subfolder a class")
    parser.add_argument("--save", type=weights_path, help="a .msgpack file for the float32 weights, after each epoch")
    for field in dataclasses.fields(Recipe):
        if field.name in ("epochs", "batch", "size", "width"):
            parser.add_argument(f"--{field.name}", type=positive_int, default=field.default)
    args = vars(parser.parse_args(argv))
    folder, save = args.pop("folder"), args.pop("save")
    if not (folder / "train").is_dir():
        parser.error(f"argument folder: expected a folder with a subfolder train, got {str(folder)!r}")
    recipe = Recipe(**args)
    classes = find_classes(folder / "train")
    found = len(find_images(folder / "train", classes)[0])
    if found < recipe.batch:
        parser.error(f"argument --batch: {recipe.batch} is more than the {found} images in {str(folder / 'train')!r}")
    if (folder / "val").is_dir() and not find_images(folder / "val", classes)[0]:
        parser.error(f"argument folder: {str(folder / 'val')!r} has no images in subfolders with the names of classes")
    return train(folder, recipe, save)


if __name__ == "__main__":
    main()
