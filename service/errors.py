"""The one tree of exceptions; each leaf exists because one caller acts differently on it.

CacheRouteError                                            caught by            what the caller does
+ InvalidInput         a value from outside is unusable    planner.cli.main     exit 2, nothing was started or written
  + InvalidParameter   a rule's parameter out of range     planner.cli.main     exit 3, the published plan stays
+ InvalidPlan          a plan breaks its own rules         service.feed / CLI   keep the last table, count it / exit 3
+ PlanConflict         somebody published first            planner.cycle / CLI  plan again from the newer head / exit 4
+ NotLeading           another planner holds the lease     planner.job / CLI    stand by / exit 4
+ PlanFrozen           an operator keeps planners away     planner.cycle        record it and wait
+ StoreUnavailable     Redis cannot be reached             service.feed / CLI   go on with the last table / exit 5
+ ServerUnavailable    another server cannot be reached    planner.cli.main     exit 5
+ NoReadyEndpoint      nothing to pick from                service.answers      ImmediateResponse 503
+ DiscoveryFailed      the fleet cannot be found out       service.discovery    keep the last fleet, count it, ask again
"""


class CacheRouteError(Exception):
    """Root of the tree; `exit_code` is what the command line exits with."""

    exit_code = 1


class InvalidInput(CacheRouteError):
    """A value that came from outside cannot be used.

    what: names the thing (file, line, column, option, variable).  remedy: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class InvalidParameter(InvalidInput):
    """Everything can be read, but planning by it would be wrong (an ε below 0, say): refused as a bad plan is."""

    exit_code = 3


class InvalidPlan(CacheRouteError):
    """A plan breaks a rule of its schema; `cause` is a short word for metrics (checksum, schema, endpoint, …)."""

    exit_code = 3

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class PlanConflict(CacheRouteError):
    """The published plan is not the one this publication was built upon."""

    exit_code = 4

    def __init__(self, expected_version: int, published_version: int) -> None:
        super().__init__(
            f"expected plan version {expected_version} to be published but found version {published_version}; "
            "somebody was faster: read the newer plan and try again"
        )
        self.expected_version = expected_version
        self.published_version = published_version


class NotLeading(CacheRouteError):
    """A planner tried what only the one that leads may do; `leader` is who that is, empty: nobody at the moment."""

    exit_code = 4

    def __init__(self, leader: str) -> None:
        super().__init__(
            f"planner {leader} leads this pool; wait until it ends, or take the lead with --force"
            if leader
            else "this planner lost its lease in the middle of a cycle; nothing was published"
        )
        self.leader = leader


class PlanFrozen(CacheRouteError):
    """An operator froze the pool's plan; only operators publish."""

    exit_code = 3


class StoreUnavailable(CacheRouteError):
    """Redis cannot be reached, or answers with an error that is not ours; chained to the client's exception."""

    exit_code = 5


class ServerUnavailable(CacheRouteError):
    """A server other than Redis cannot be reached or did not become ready in time."""

    exit_code = 5


class NoReadyEndpoint(CacheRouteError):
    """No endpoint of the fleet is ready; `endpoints` is how many are known."""

    def __init__(self, endpoints: int) -> None:
        super().__init__(f"none of {endpoints} endpoints is ready")
        self.endpoints = endpoints


class DiscoveryFailed(CacheRouteError):
    """Where the endpoints are to be found cannot be asked, or answers nothing usable.

    cause: a short word for metrics.  remedy: what to do about it.
    """

    def __init__(self, cause: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.cause = cause
        self.remedy = remedy
