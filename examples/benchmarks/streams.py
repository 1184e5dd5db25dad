"""Compare how fast two workers read files, how fast they resume, and how much memory they need.

    python examples/benchmarks/streams.py
    python examples/benchmarks/streams.py --formats jsonl --sides raysgd litData

Each side reads one epoch of the same samples on two workers, without loader processes, and makes
batches of 64. The work per sample is small: 64 bytes of a text, or a decoded image. litData and
MosaicML streaming read a copy of the data in their own format. *raysgd in turn* reads Parquet with
``interleave=2``: like the other sides, it does not keep the order of the files. A side whose
package is missing is skipped. *resume* is the time to the first batch at 90 % of an epoch: raysgd
loads a checkpoint, and Hugging Face skips samples. *memory* is that of a worker after 20 % and at
the end of the epoch.
"""

import argparse
import importlib
import io
import json
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _workloads import machine
from torch.utils.data import DataLoader

NUM_WORKERS, BATCH_SIZE, NUM_FILES = 2, 64, 8
CONVERTED = ("litData", "MosaicML")
SIDES = {
    "raysgd": "raysgd",
    "raysgd in turn": "raysgd",
    "Hugging Face": "datasets",
    "webdataset": "webdataset",
    "litData": "litdata",
    "MosaicML": "streaming",
}
READS = {
    "jsonl": ("raysgd", "Hugging Face", *CONVERTED),
    "parquet": ("raysgd", "raysgd in turn", "Hugging Face", *CONVERTED),
    "tar": ("raysgd", "Hugging Face", "webdataset", *CONVERTED),
}


# ---- data and work


def texts(number, size):
    """Return samples of about 1 kB."""
    words = np.random.default_rng(number).integers(10**6, 10**7, (size, 120))
    return [
        {"id": number * size + i, "text": " ".join(map(str, row))} for i, row in enumerate(words)
    ]


def images(number, size):
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (size, 6, 6, 3), dtype=np.uint8)
    for i, each in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(each).resize((128, 128)).save(file, "JPEG")
        yield {"id": number * size + i, "jpg": file.getvalue()}


def work(sample):
    """Return the tensors of a sample of any format."""
    if "text" in sample:
        data = np.frombuffer(sample["text"][:64].encode(), np.uint8).astype(np.int64)
        return int(sample["id"]), torch.from_numpy(data)
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(sample["jpg"])))
    return int(sample["id"] if "id" in sample else sample["cls"]), torch.from_numpy(pixels.copy())


def make_data(folder, kind, megabytes):
    """Write files and return the number of samples."""
    size = int(megabytes * 1e6 / (970 if kind != "tar" else 2300) / NUM_FILES)
    for number in range(NUM_FILES):
        path = folder / f"{number}.{kind}"
        if kind == "jsonl":
            with open(path, "w") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in texts(number, size))
        elif kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            table = pyarrow.Table.from_pylist(texts(number, size))
            parquet.write_table(table, path, row_group_size=10_000)
        else:
            with tarfile.open(path, "w") as archive:
                for sample in images(number, size):
                    for name, data in (("jpg", sample["jpg"]), ("cls", b"%d" % sample["id"])):
                        member = tarfile.TarInfo(f"{sample['id']:08}.{name}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
    return size * NUM_FILES


def samples(kind, folder):
    from raysgd.data import Stream, jsonl, parquet, tar

    open_files = {"jsonl": jsonl, "parquet": parquet, "tar": tar}[kind]
    for sample in Stream(open_files(f"{folder}/*.{kind}", cache_dir=folder / "cache")):
        if kind == "tar":
            yield {"id": int(sample["cls"]), "jpg": sample["jpg"]}
        else:
            yield sample


def _same(sample):
    return sample


def convert(side, kind, folder, target):
    if side == "litData":
        import litdata

        litdata.optimize(
            fn=_same,
            inputs=list(samples(kind, folder)),
            output_dir=str(target),
            chunk_bytes="64MB",
            num_workers=1,
        )
    else:
        import streaming

        columns = {"id": "int", "jpg": "bytes"} if kind == "tar" else {"id": "int", "text": "str"}
        with streaming.MDSWriter(out=str(target), columns=columns) as writer:
            for sample in samples(kind, folder):
                writer.write(sample)


# ---- sides


def hugging_face(kind, folder, rank):
    import datasets
    from datasets.distributed import split_dataset_by_node

    builder = {"jsonl": "json", "parquet": "parquet", "tar": "webdataset"}[kind]
    files = sorted(map(str, folder.glob(f"*.{kind}")))
    data = datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
    if kind == "tar":
        data = data.cast_column("jpg", datasets.Image(decode=False))
    return split_dataset_by_node(data, rank, NUM_WORKERS)


def of_hugging_face(sample):
    if "jpg" in sample:
        return work({"jpg": sample["jpg"]["bytes"], "cls": sample["cls"]})
    return work(sample)


class Mapped(torch.utils.data.IterableDataset):
    def __init__(self, data, function):
        self.data, self.function = data, function

    def __iter__(self):
        return map(self.function, self.data)


def loader_of(side, kind, folder, rank):
    if side == "Hugging Face":
        data = Mapped(hugging_face(kind, folder, rank), of_hugging_face)
    elif side == "webdataset":
        import webdataset

        files = sorted(map(str, folder.glob("*.tar")))
        split = webdataset.split_by_node
        data = webdataset.WebDataset(files, nodesplitter=split, shardshuffle=False).map(work)
    elif side == "litData":
        import litdata

        data = litdata.StreamingDataset(str(folder / side), transform=work)
        return litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE)
    else:
        import streaming

        local = str(folder / side)
        data = streaming.StreamingDataset(local=local, batch_size=BATCH_SIZE, shuffle=False)
        data = Mapped(data, work)
    return DataLoader(data, batch_size=BATCH_SIZE)


def memory_mb():
    """Return the memory of this process that it does not share with files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1000


def read(batches, num_samples):
    """Read an epoch. Return the samples, their checksum, and the memory early and at the end."""
    count, total, early = 0, 0, 0.0
    for numbers, _ in batches:
        count += len(numbers)
        total += int(numbers.sum())
        if not early and count * NUM_WORKERS > num_samples / 5:
            early = memory_mb()
    return count, total, early, memory_mb()


def peer(side, kind, folder, rank, num_samples, barrier, results):
    for name in ("RANK", "GLOBAL_RANK", "LOCAL_RANK", "NODE_RANK"):
        os.environ[name] = "0" if name == "NODE_RANK" else str(rank)
    os.environ |= {"WORLD_SIZE": str(NUM_WORKERS), "LOCAL_WORLD_SIZE": str(NUM_WORKERS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "NUM_NODES": "1"}
    torch.set_num_threads(1)
    if side in ("webdataset", "MosaicML"):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)
    loader = loader_of(side, kind, folder, rank)
    barrier.wait()
    started = time.time()
    found = read(loader, num_samples)
    results.put((started, time.time(), *found))
    barrier.wait()


def measure_peer(side, kind, folder, num_samples):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(NUM_WORKERS), context.Queue()
    processes = [
        context.Process(target=peer, args=(side, kind, folder, rank, num_samples, barrier, results))
        for rank in range(NUM_WORKERS)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return span_of(found)


def span_of(found):
    """Return the seconds from the first start to the last end, and the other results."""
    return max(f[1] for f in found) - min(f[0] for f in found), [f[2:] for f in found]


def resume_hugging_face(kind, folder, num_samples):
    data = hugging_face(kind, folder, 0).skip(int(0.9 * num_samples / NUM_WORKERS))
    started = time.perf_counter()
    next(iter(DataLoader(Mapped(data, of_hugging_face), batch_size=BATCH_SIZE)))
    return time.perf_counter() - started


def measure_raysgd(kind, folder, num_samples, interleave):
    from raysgd import TorchTrainer, TrainingOperator
    from raysgd.data import Stream, jsonl, parquet, tar

    class Reader(TrainingOperator):
        def setup(self, config):
            torch.set_num_threads(1)
            model = torch.nn.Linear(1, 1)
            self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.0))
            open_files = {"jsonl": jsonl, "parquet": parquet, "tar": tar}[kind]
            records = open_files(f"{folder}/*.{kind}", cache_dir=folder / "cache")
            stream = Stream(records, transform=work, interleave=interleave)
            self.register_data(train_loader=DataLoader(stream, batch_size=BATCH_SIZE))

        def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
            began = time.time()
            if num_steps is not None:
                next(iterator)
                self.first_batch_s = time.time() - began
                return {"num_samples": BATCH_SIZE}
            found = read(self.train_loader, num_samples)  # reads, and makes no steps
            self.found = began, time.time(), *found
            return {"num_samples": found[0]}

    with TorchTrainer(training_operator_cls=Reader, num_workers=NUM_WORKERS) as trainer:
        steps = int(0.9 * num_samples / (BATCH_SIZE * NUM_WORKERS))
        trainer.train()
        found = trainer.apply_all_operators(lambda operator: operator.found)
        saved = trainer.state_dict()
        saved["data"]["offset"] = steps * BATCH_SIZE * NUM_WORKERS
    with TorchTrainer(training_operator_cls=Reader, num_workers=NUM_WORKERS) as trainer:
        trainer.load_state_dict(saved)
        trainer.train(num_steps=1)
        resume = max(trainer.apply_all_operators(lambda operator: operator.first_batch_s))
    return *span_of(found), resume


# ---- the comparison


def measure(side, kind, folder, num_samples):
    if side in CONVERTED and not (folder / side).exists():
        part = folder / f"{side}.part"
        shutil.rmtree(part, ignore_errors=True)
        convert(side, kind, folder, part)
        part.rename(folder / side)
    resume = None
    if side.startswith("raysgd"):
        interleave = 1 if side == "raysgd" else NUM_WORKERS
        seconds, found, resume = measure_raysgd(kind, folder, num_samples, interleave)
    else:
        seconds, found = measure_peer(side, kind, folder, num_samples)
        if side == "Hugging Face":
            resume = resume_hugging_face(kind, folder, num_samples)
    counts, totals, early, late = zip(*found, strict=True)
    whole = (num_samples, num_samples * (num_samples - 1) // 2)
    note = "" if (sum(counts), sum(totals)) == whole else f"  {sum(counts)} of {num_samples}"
    shown = "" if resume is None else f"{resume:.2f} s"
    memory = f"{max(early):.0f} to {max(late):.0f} MB"
    print(
        f"{kind:8} {side:14} {sum(counts) / seconds:>10,.0f} {shown:>8} {memory:>16}{note}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=list(READS), choices=READS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--image-megabytes", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the data here")
    parser.add_argument("--smoke-test", action="store_true", help="little data")
    args = parser.parse_args()
    if args.smoke_test:
        args.megabytes = args.image_megabytes = 1.0
    print(machine())
    print(f"{'format':8} {'side':14} {'samples/s':>10} {'resume':>8} {'memory':>16}")
    for kind in args.formats:
        folder = (args.folder or Path(tempfile.mkdtemp())) / kind
        megabytes = args.image_megabytes if kind == "tar" else args.megabytes
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "size").write_text(str(make_data(folder, kind, megabytes)))
        num_samples = int((folder / "size").read_text())
        for _ in range(args.repeats):
            for side in READS[kind]:
                if side not in args.sides:
                    continue
                try:
                    importlib.import_module(SIDES[side])
                except ImportError:
                    print(f"{kind:8} {side:14} skipped, because {SIDES[side]} is not installed")
                    continue
                measure(side, kind, folder, num_samples)
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
