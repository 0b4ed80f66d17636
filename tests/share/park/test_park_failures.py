"""What goes wrong leaves the model as it was. Each case in a process of its own."""

import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from forks import FORKS

MIB = 1 << 20

PRELUDE = """
import gc, os, resource, signal, sys, threading
from pathlib import Path
import torch
from torch import nn
import memfit
from memfit.errors import ParkError
from memfit.share.park.parked import ParkedModel
torch.set_num_threads(1)  # a forked child has no other thread of OpenMP's, and would wait for it

def resident_bytes():
    # A model that came back may have pages of its own, or its file's.
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(l.split()[1]) * 1024 for l in lines if l.startswith(("RssAnon", "RssFile")))

def model_of(mebibytes):
    torch.manual_seed(0)
    return nn.Linear(1024, 256 * mebibytes, bias=False)

def told(action):
    try:
        action()
    except ParkError as error:
        print(error.reason, str(error).splitlines()[0])
    else:
        print("no error")
"""


def run_alone(code, *arguments, ends=0):
    done = FORKS.run("-c", PRELUDE + textwrap.dedent(code), *arguments)
    assert done.code == ends, done.stderr
    return done


def run_new(code, *arguments, before=()):
    """Run in a process that nothing but its own start has touched, maybe by another program."""
    command = [*before, sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_all_memory_of_the_parameters_is_given_back_and_no_more_is_taken(tmp_path):
    done = run_new(
        """
        first = ParkedModel(nn.Linear(1024, 1024), sys.argv[1], allow_memory=True)
        for _ in range(2):  # brings in the code that this takes, which is files' too
            first.park()
            first.wake()
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)])  # 96 MiB
        taken = sum(p.nbytes for p in model.parameters())
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        awake = resident_bytes()
        for _ in range(3):
            parked.park()
            print((awake - resident_bytes()) / taken)
            parked.wake()
            print((resident_bytes() - awake) / taken)
        """,
        tmp_path,
    )
    figures = [float(line) for line in done.stdout.split()]
    assert all(abs(figure - 1) <= 0.01 for figure in figures[::2])
    assert all(abs(figure) <= 0.01 for figure in figures[1::2])


def test_a_wake_without_memory_leaves_the_model_parked_and_whole(tmp_path):
    done = run_new(
        """
        model = model_of(64)
        before = model.weight.detach().clone()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        parked.park()
        lines = open("/proc/self/status").read().splitlines()
        data = next(int(l.split()[1]) * 1024 for l in lines if l.startswith("VmData"))
        parked_bytes = resident_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (data + (16 << 20), resource.RLIM_INFINITY))
        told(parked.wake)
        told(lambda: model.weight.sum())
        print(parked.is_parked, abs(resident_bytes() - parked_bytes) < (8 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        parked.wake()
        print(torch.equal(model.weight, before))
        """,
        tmp_path,
    )
    refused, used, state, same = done.stdout.splitlines()
    assert refused.startswith("no_memory no memory to wake 64.0 MiB (67108864 bytes)")
    assert used == "parked `weight` was used while its model is parked"
    assert (state, same) == ("True True", "True")


def test_a_file_that_may_not_grow_leaves_the_model_awake(tmp_path):
    done = run_alone(
        f"""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        model = model_of(8)
        before = model.weight.detach().clone()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        address = model.weight.data_ptr()
        resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * MIB}, resource.RLIM_INFINITY))
        told(parked.park)
        is_same = torch.equal(model.weight, before) and model.weight.data_ptr() == address
        print(parked.is_parked, is_same)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        parked.park()
        parked.wake()
        print(torch.equal(model.weight, before))
        """,
        tmp_path,
    )
    error, state, same = done.stdout.splitlines()
    assert error.startswith("transfer writing 8.0 MiB of parked models in")
    assert state == "False True"
    assert same == "True"


def test_a_full_disk_leaves_the_model_awake_and_takes_no_room(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "memfit", str(tmp_path)]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--mount", *mount], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    done = run_new(
        """
        import subprocess
        mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "memfit", sys.argv[1]]
        subprocess.run(mount, check=True)
        def free():
            found = os.statvfs(sys.argv[1])
            return found.f_bavail * found.f_frsize
        small, large = model_of(8), model_of(16)
        before = large.weight.detach().clone()
        first = ParkedModel(small, sys.argv[1], allow_memory=True)
        first.park()
        second = ParkedModel(large, sys.argv[1], allow_memory=True)
        left = free()
        told(second.park)
        print(second.is_parked, torch.equal(large.weight, before), free() == left)
        first.close()
        second.park()
        second.wake()
        print(torch.equal(large.weight, before))
        """,
        tmp_path,
        before=["unshare", "--mount"],
    )
    error, state, same = done.stdout.splitlines()
    assert error.startswith("no_space no space in")
    assert "16.0 MiB (16777216 bytes) of parked models: 12.0 MiB" in error
    assert (state, same) == ("False True True", "True")


def test_nothing_is_left_after_a_kill(tmp_path):
    run_alone(
        """
        parked = ParkedModel(model_of(32), sys.argv[1], allow_memory=True)
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            parked.park()
            parked.wake()
            parked.model.weight.data.add_(1)
        """,
        tmp_path,
        ends=-signal.SIGKILL,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_fork_has_its_own_model_when_awake_and_none_when_parked(tmp_path):
    done = run_alone(
        """
        model = model_of(4)
        before = model.weight.detach().clone()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        if os.fork() == 0:
            with torch.no_grad():
                model.weight.zero_()
            told(parked.park)
            print(bool((model.weight == 0).all()), flush=True)
            os._exit(0)
        os.wait()
        print(torch.equal(model.weight, before), flush=True)
        parked.park()
        if os.fork() == 0:
            told(parked.wake)
            told(lambda: model.weight.sum())
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        parked.wake()
        print(torch.equal(model.weight, before))
        """,
        tmp_path,
    )
    parking, own, parents, waking, used, same = done.stdout.splitlines()
    assert parking.startswith("forked the model was made parkable by the process that this one is")
    assert waking.startswith("forked ")
    assert used.startswith("parked ")
    assert (own, parents, same) == ("True", "True", "True")


def test_a_fork_keeps_its_model_whatever_its_parent_parks_and_closes(tmp_path):
    done = run_alone(
        """
        model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
        before = [weight.detach().clone() for weight in model.parameters()]
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        parked.park()
        parked.wake()
        to_child, to_parent = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            model[0].weight.data[0].zero_()
            os.write(to_parent[1], b".")
            os.read(to_child[0], 1)
            same = torch.equal(model[0].weight[1:], before[0][1:])
            print(same, torch.equal(model[1].weight, before[1]), flush=True)
            os._exit(0)
        os.read(to_parent[0], 1)
        for _ in range(3):
            for weight in model.parameters():
                weight.data.add_(1)
            parked.park()
            parked.wake()
        parked.close()
        os.write(to_child[1], b".")
        assert os.waitpid(child, 0)[1] == 0
        now = [a + 1 + 1 + 1 for a in before]
        print(all(torch.equal(*pair) for pair in zip(model.parameters(), now)))
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["True True", "True"]


def test_a_fork_has_what_had_come_of_a_model_and_not_the_rest(tmp_path):
    done = run_alone(
        """
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
        before = [weight.detach().clone() for weight in model.parameters()]
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        parked.park()
        for link in Path("/proc/self/fd").iterdir():
            if str(os.path.realpath(link)).startswith(sys.argv[1]):
                os.utime(link)  # as if it had been changed: what is in memory is read again
        parked.wake(stream=True)
        weights = list(model.parameters())
        print(torch.equal(weights[0], before[0]), flush=True)
        if os.fork() == 0:
            print(torch.equal(weights[0], before[0]), flush=True)
            told(lambda: weights[1].sum())
            sys.stdout.flush()
            del model, parked, weights
            gc.collect()
            os._exit(0)
        assert os.wait()[1] == 0
        print(all(map(torch.equal, weights, before)))
        """,
        tmp_path,
    )
    came, own, rest, parents = done.stdout.splitlines()
    assert (came, own, parents) == ("True", "True", "True")
    assert rest.startswith("forked ")


def test_a_model_that_was_closed_leaves_no_room_taken_on_the_disk(tmp_path):
    done = run_alone(
        """
        model = model_of(8)
        before = model.weight.detach().clone()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        parked.park()
        parked.wake()
        parked.close()
        print([line for line in open("/proc/self/maps") if sys.argv[1] in line])
        print(torch.equal(model.weight, before))
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["[]", "True"]


def test_a_pointer_from_before_meets_a_fault_and_no_zeros(tmp_path):
    done = run_alone(
        """
        import ctypes
        model = model_of(4)
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        pointer = ctypes.c_float.from_address(model.weight.data_ptr())
        print(pointer.value == model.weight[0, 0].item(), flush=True)
        parked.park()
        print(pointer.value)
        """,
        tmp_path,
        ends=-signal.SIGSEGV,
    )
    assert done.stdout == "True\n"


def test_ctrl_c_ends_a_transfer_and_changes_nothing(tmp_path):
    done = run_alone(
        """
        model = model_of(192)
        before = model.weight.detach().clone()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        def interrupt(number, frame):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        def interrupted(action):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                action()
            except KeyboardInterrupt:
                return True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            return False
        print(interrupted(parked.park), parked.is_parked, torch.equal(model.weight, before))
        parked.park()
        interrupted(parked.wake)  # a fast disk may be faster than the alarm
        parked.wake()
        print(torch.equal(model.weight, before))
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["True False True", "True"]


def test_threads_that_park_and_wake_one_model_never_see_it_half(tmp_path):
    done = run_alone(
        """
        model = model_of(4)
        expected = model.weight.double().sum().item()
        parked = ParkedModel(model, sys.argv[1], allow_memory=True)
        parked.park()
        refused = set()
        def work():
            for _ in range(30):
                with parked.awake():
                    assert model.weight.double().sum().item() == expected
                    try:
                        parked.park()
                    except ParkError as error:
                        refused.add(error.reason)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(parked.is_parked, refused)
        parked.wake()
        print(model.weight.double().sum().item() == expected)
        """,
        tmp_path,
    )
    assert done.stderr == ""
    assert done.stdout == "True {'in_use'}\nTrue\n"
