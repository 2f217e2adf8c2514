"""WorkerThread: calls in order, errors where results are read, and an end that waits for nothing that hangs."""

import subprocess
import sys
import threading
import weakref

import pytest

from jaxllm.worker_thread import WorkerThread


def test_calls_run_in_order_and_errors_are_raised_where_results_are_read():
    worker, found = WorkerThread("test"), []
    failed = worker.submit(lambda: 1 / 0)
    futures = [worker.submit(lambda i=i: found.append(i) or i) for i in range(100)]
    worker.drain()
    assert found == [future.result() for future in futures] == list(range(100))
    with pytest.raises(ZeroDivisionError):
        failed.result()
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(RuntimeError, match="the thread test has been shut down"):
        worker.submit(lambda: None)


def test_drain_does_not_wait_for_later_calls():
    worker, is_drained = WorkerThread("test"), threading.Event()

    def call():
        if not is_drained.wait(0.001):
            worker.submit(call)

    worker.submit(call)
    drain = threading.Thread(target=lambda: (worker.drain(), is_drained.set()), daemon=True)
    drain.start()
    drain.join(5)
    was_drained = is_drained.is_set()
    is_drained.set()
    assert was_drained


def test_an_abandoned_thread_makes_no_further_calls():
    worker, go, found = WorkerThread("test"), threading.Event(), []
    first, second = worker.submit(go.wait), worker.submit(lambda: found.append(1))
    while not first.running():
        pass
    worker.abandon()
    go.set()
    worker.shutdown()
    assert first.result() and second.cancelled() and not found


def test_a_thread_ends_with_its_object_and_keeps_no_result():
    class Result:
        pass

    worker = WorkerThread("of-an-object")
    result = weakref.ref(worker.submit(Result).result())
    worker.submit(lambda: None).result()
    assert result() is None
    thread = worker._thread
    del worker
    thread.join(5)
    assert not thread.is_alive()


def test_the_interpreter_ends_although_a_call_hangs():
    code = "import threading; from jaxllm.worker_thread import WorkerThread; w = WorkerThread('test'); w.submit(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0
