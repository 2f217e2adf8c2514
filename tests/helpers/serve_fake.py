"""A whole server over a fake engine core, as a process: `python -m tests.helpers.serve_fake '{"model": …, "uds": …}'`."""

import dataclasses
import json
import sys

from jaxllm import log
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError
from jaxllm.replicas.hosts.host import serve_replicas
from server.listening import address_of
from server.options import ServerOptions
from server.serve import Serving, serve
from tests.helpers.served_core import FACTORY


def main() -> int:
    given = json.loads(sys.argv[1])
    factory = given.pop("core_factory", FACTORY)
    known = {f.name for group in dataclasses.fields(EngineConfig) for f in dataclasses.fields(group.default_factory())}  # type: ignore[arg-type, misc]
    options = ServerOptions.from_options(**{name: value for name, value in given.items() if name not in known})
    roles, of_engines = options.processes.roles, {name: value for name, value in given.items() if name in known}
    config = EngineConfig.from_options(**(of_engines if roles is None else roles.applied_to(of_engines)))

    log.set_up()

    def ready(serving: Serving) -> None:
        print(json.dumps({"address": None if options.network.uds else address_of(serving.socket)}), flush=True)

    try:
        if config.parallel.node_rank:
            drain_seconds, step_timeout = options.network.shutdown_timeout, options.processes.step_timeout
            more = {"core_factory": factory or None, "step_timeout_seconds": step_timeout}
            return serve_replicas(config, drain_seconds=drain_seconds, roles=roles, **more)
        return serve(config, options, on_ready=ready, core_factory=factory or None)
    except JaxLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
