package status

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
)

// What an agent serves beside its status to those who may see it: a ServiceAccount of the installation namespace,
// whose token stands in a header, because the API server takes its own away on the road to a pod. The token is for
// TokenAudience alone, so it is of no use anywhere else.
const (
	TokenHeader     = "Isthmus-Token"
	TokenAudience   = "isthmus-agent"
	ObserverAccount = "isthmus-observer"
)

const (
	// ExplainPath takes namespace= and name= of a Service, and resolver=, an address of the cluster's DNS or nothing.
	// It answers with an Explanation.
	ExplainPath = "/explain"
	// ObservePath takes sample=N, one of so many choices, service=NAMESPACE/NAME, reason= and refused=true. It answers
	// with Events as they happen, one a line, and with an empty line now and then.
	ObservePath = "/observe"
	// AskPath takes server=, the address and port of a name server, up to MaxAsked times. It answers with a list of
	// ClusterDNS, whether each answers for clusterset.local, in that order.
	AskPath = "/ask"
	// ShowPath is followed by a name of ShowTables. It answers with that table.
	ShowPath = "/show/"
)

// MaxAsked is how many name servers an agent asks at once.
const MaxAsked = 32

// ShowTables are the names of the tables of what stands in a node's kernel.
func ShowTables() []string { return []string{"services", "backends", "connections", "hooks", "drops"} }

// DecodeTable reads one of ShowTables as it is served.
func DecodeTable(name string, body []byte) (tables.Table, error) {
	switch name {
	case "services":
		return decodeTable[tables.Services](body)
	case "backends":
		return decodeTable[tables.Backends](body)
	case "connections":
		return decodeTable[tables.Connections](body)
	case "hooks":
		return decodeTable[tables.Hooks](body)
	case "drops":
		return decodeTable[tables.Drops](body)
	}
	return nil, fmt.Errorf("no table is called %s", name)
}

func decodeTable[T tables.Table](body []byte) (tables.Table, error) {
	var t T
	err := json.Unmarshal(body, &t)
	return t, err
}

// Link is one link of the chain from a Service's name to the pods behind it.
type Link struct {
	Link  string    `json:"link"`
	State LinkState `json:"state"`
	Text  string    `json:"text"`
	Fix   string    `json:"fix,omitempty"` // when it is broken
}

// LinkState says whether a link holds.
type LinkState string

// A note is about something that need not be, or that need not hold.
const (
	LinkOK     LinkState = "ok"
	LinkBroken LinkState = "broken"
	LinkNote   LinkState = "note"
)

// Explanation is how one Service fares on one node.
type Explanation struct {
	Node      string              `json:"node"`
	Service   string              `json:"service"` // namespace/name
	Links     []Link              `json:"links"`   // in the order in which they hang on each other
	Endpoints []ExplainedEndpoint `json:"endpoints,omitempty"`
	Frontends []ExplainedFrontend `json:"frontends,omitempty"`
	// Chosen is how often a backend was picked for a client on this node, and Refused how many were refused by reason.
	Chosen  uint64            `json:"chosen"`
	Refused map[string]uint64 `json:"refused,omitempty"`
}

// ExplainedEndpoint is an endpoint as one node uses it.
type ExplainedEndpoint struct {
	Address netip.Addr `json:"address"`
	Cluster string     `json:"cluster"`
	Node    string     `json:"node,omitempty"`
	State   string     `json:"state"` // "serves", "not ready", "terminating", "drained" or "stands by"
}

// ExplainedFrontend is a VIP, port and protocol in a node's kernel.
type ExplainedFrontend struct {
	VIP      netip.AddrPort   `json:"vip"`
	Protocol string           `json:"protocol"`
	State    string           `json:"state"` // "right", "missing", "wrong" or "taken"
	Backends []netip.AddrPort `json:"backends,omitempty"`
}

// Event is one client that was given a backend, or refused. What is not known is left out.
type Event struct {
	Time     time.Time      `json:"time"`
	Node     string         `json:"node"`
	Verdict  string         `json:"verdict"` // "chosen" or "refused"
	Reason   string         `json:"reason,omitempty"`
	Path     string         `json:"path"` // "socket" or "packet"
	Protocol string         `json:"protocol"`
	Service  string         `json:"service,omitempty"` // namespace/name
	Client   netip.AddrPort `json:"client,omitzero"`   // not on the socket path, where it has no address yet
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend,omitzero"`
	Cluster  string         `json:"cluster,omitempty"` // of the backend
	Netns    uint64         `json:"netns,omitempty"`   // cookie of the client's network namespace
	PID      uint32         `json:"pid,omitempty"`
	Command  string         `json:"command,omitempty"`
	// Lost is how many events before this one the reader was too slow for.
	Lost uint64 `json:"lost,omitempty"`
	// Error is why there will be no more events. Then there is nothing else.
	Error string `json:"error,omitempty"`
}
