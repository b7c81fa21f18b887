"""The batches that run in a server, in the background: its other requests go first."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING

from shardline.api.requests import request_owner
from shardline.server.errors import ApiError, bad_request
from shardline.server.openai.batch.answer_log import AnswerLog, OtherAnswers
from shardline.server.openai.batch.executor import BatchExecutor, BatchStopped
from shardline.server.openai.batch.lines import Answer, RepeatedIds, count_requests, read_lines
from shardline.server.openai.batch.store import (
    ENDED,
    Batch,
    BatchError,
    BatchErrors,
    BatchStore,
    ExpiresAfter,
    FileObject,
    RequestCounts,
    Status,
    StorageFull,
)
from shardline.server.openai.generation import usual_priority

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

PRIORITY = 1 << 20
"""Of the requests of batches that do not say theirs: after those of everybody else."""
MAX_RUNNING = 64
"""Batches that are read at a time; further ones wait."""
_LOOK_SECONDS = 0.2
"""Between two looks whether the engine has started."""


class _Failed(Exception):
    """A batch cannot be run at all."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BatchJobs:
    """Runs the batches of a store. Construct it on the event loop: unfinished batches go on at once.

    Args:
        max_line_bytes: longer requests are refused.

    `store` has the batches and their files.
    """

    def __init__(self, store: BatchStore, executor: BatchExecutor, llm: AsyncLLM, max_line_bytes: int) -> None:
        self.store = store
        self._executor = executor
        self._llm = llm
        self._max_line_bytes = max_line_bytes
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for batch in reversed(store.batches()):
            if batch.status not in ENDED:
                self._start(batch)

    async def close(self) -> None:
        """Stop all batches; they go on when the next server starts. The store is closed, too."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    def create(
        self,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        output_expires_after: ExpiresAfter | None,
    ) -> Batch:
        """Begin a batch.

        Raises:
            ApiError: 400, the endpoint takes no batches; 404, there is no such file; 413, there are too many batches.
        """
        urls = self._executor.urls
        if endpoint not in urls:
            raise bad_request(f"'endpoint' must be one of {', '.join(sorted(urls))}.", "endpoint", "invalid_value")
        self.store.find_file(input_file_id)
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=int(time.time()),
            metadata=metadata,
            output_expires_after=output_expires_after,
        )
        self.store.save_batch(batch)
        self._start(batch)
        return batch

    def cancel(self, batch_id: str) -> Batch:
        """Begin to cancel a batch; the answers that it has remain.

        Raises:
            ApiError: 404; 409, it has ended.
        """
        batch = self.store.find_batch(batch_id)
        if batch.status in ENDED:
            raise ApiError(409, f"Cannot cancel a batch with status '{batch.status}'.", code="batch_ended")
        if batch.status != "cancelling":
            self._set_status(batch, "cancelling")
            # A server that ends has none left; the next one sees the status.
            if batch_id in self._tasks:
                self._tasks[batch_id].cancel()
        return batch

    def _start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        """Run a batch to its end, unless the server ends first."""
        usual_priority.set(PRIORITY)
        request_owner.set(batch.id)
        log = AnswerLog(
            self.store.path_of(batch.output_id),
            self.store.path_of(batch.errors_id),
            errors_in_body=True,
            before_write=self.store.reserve,
        )
        try:
            if batch.status != "cancelling":
                async with self._turns:
                    await self._answer(batch, log)
            self._end(batch, log, "cancelled" if batch.status == "cancelling" else "completed")
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
            self._end(batch, log, "cancelled")
        except BatchStopped as error:
            logger.info("the batch %s goes on when a server starts: %s", batch.id, error)
        except _Failed as error:
            self._fail(batch, log, error.code, str(error))
        except RepeatedIds as error:
            self._fail(batch, log, "duplicate_custom_id", str(error), error.line)
        except StorageFull as error:
            self._fail(batch, log, "storage_full", str(error.detail))
        except OtherAnswers as error:
            self._fail(batch, log, "model_changed", f"the batch was begun by another model: {error}")
        except Exception as error:
            logger.exception("the batch %s failed", batch.id)
            self._fail(batch, log, "internal_error", f"the batch failed: {type(error).__name__}")
        finally:
            log.close()

    async def _answer(self, batch: Batch, log: AnswerLog) -> None:
        """Answer the requests that have no answer yet."""
        while self._llm.state() == "starting":
            await asyncio.sleep(_LOOK_SECONDS)
        if self._llm.state() == "dead":
            raise BatchStopped(self._llm.dead_reason)
        path = self.store.path_of(batch.input_file_id)
        with open(path, "rb") as file:
            total = await asyncio.to_thread(count_requests, file, self._max_line_bytes)
            if total == 0:
                raise _Failed("empty_file", "the input file has no requests")
            batch.request_counts = RequestCounts(total)
            if batch.status == "validating":
                self._set_status(batch, "in_progress")
            fingerprint = self._llm.model.fingerprint
            lines = await asyncio.to_thread(log.skip_answered, read_lines(file, self._max_line_bytes), fingerprint)
            self._count(batch, log)
            log.open()

            def write(answer: Answer) -> None:
                log.append(answer)
                self._count(batch, log)

            await self._executor.run(lines, write, {batch.endpoint})

    def _count(self, batch: Batch, log: AnswerLog) -> None:
        batch.request_counts.completed, batch.request_counts.failed = log.num_ok, log.num_failed

    def _fail(self, batch: Batch, log: AnswerLog, code: str, message: str, line: int | None = None) -> None:
        batch.errors = BatchErrors(data=[BatchError(code=code, message=message, line=line)])
        self._end(batch, log, "failed")

    def _end(self, batch: Batch, log: AnswerLog, status: Status) -> None:
        """Make files of the answers, and give the batch its last status."""
        log.close()
        if status == "completed":
            self._set_status(batch, "finalizing")
        batch.output_file_id = self._add_answers(batch, batch.output_id, "output")
        batch.error_file_id = self._add_answers(batch, batch.errors_id, "error")
        self._set_status(batch, status)

    def _add_answers(self, batch: Batch, file_id: str, kind: str) -> str | None:
        """Let the file with answers or with errors exist; None: it would be empty."""
        path = self.store.path_of(file_id)
        size = path.stat().st_size if path.exists() else 0
        if size == 0:
            path.unlink(missing_ok=True)
            return None
        now, expiry = int(time.time()), batch.output_expires_after
        file = FileObject(
            id=file_id,
            bytes=size,
            created_at=now,
            expires_at=None if expiry is None else now + expiry.seconds,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        self.store.add_file(file)
        return file_id

    def _set_status(self, batch: Batch, status: Status) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        self.store.save_batch(batch)
