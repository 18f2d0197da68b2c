"""Public facts about the official archives: addresses, checksums, numbers of images."""

from dataclasses import dataclass

MEGABYTE = 10**6


@dataclass(frozen=True)
class Archive:
    """An official archive that can be downloaded without an account.

    Args:
        folder: the only folder in it.
        limit: largest accepted size of the archive in bytes, slightly above its real size.
        unpacked: largest accepted total size of its files in bytes.
        files: largest accepted number of files.
    """

    url: str
    md5: str
    folder: str
    limit: int
    unpacked: int
    files: int

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


KRIZ = "https://www.cs.toronto.edu/~kriz"
ARCHIVES = {
    "cifar10": Archive(
        f"{KRIZ}/cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        limit=200 * MEGABYTE,
        unpacked=250 * MEGABYTE,
        files=20,
    ),
    "cifar100": Archive(
        f"{KRIZ}/cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        limit=200 * MEGABYTE,
        unpacked=250 * MEGABYTE,
        files=20,
    ),
    "tiny-imagenet": Archive(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
        limit=300 * MEGABYTE,
        unpacked=600 * MEGABYTE,
        files=130_000,
    ),
}
# By path relative to the folder that `--root` names.
MD5 = {
    "cifar10": {
        "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
        "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
        "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
        "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    "cifar100": {
        "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
        "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "cifar-100-python/meta": "7973b15100ade9c7d40fb424638fde48",
        "cifar-100-binary/train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
        "cifar-100-binary/test.bin": "4499cfba6c016c1be1438163640a0898",
    },
    "tiny-imagenet": {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
}
# Numbers of training images, test images and classes.
COUNTS = {
    "digits": (1_077, 720, 10),
    "cifar10": (50_000, 10_000, 10),
    "cifar100": (50_000, 10_000, 100),
    "tiny-imagenet": (100_000, 10_000, 200),
    "imagenet": (1_281_167, 50_000, 1_000),
}
