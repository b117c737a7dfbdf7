package status

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
)

// The status and introspection need a token of an account with the right to the path. isthmusctl sends one of ObserverAccount in the
// installation namespace, for the audiences of our programs alone, so that it is useless elsewhere. It has a header of its own,
// because the API server removes Authorization when it proxies to a pod.
const (
	TokenHeader     = "Isthmus-Token"
	ObserverAccount = "isthmus-observer"

	// TokenAudience is the audience of tokens for agents, ControllerAudience for controllers, and GatewayControllerAudience for
	// gateway controllers.
	TokenAudience             = "isthmus-agent"
	ControllerAudience        = "isthmus-controller"
	GatewayControllerAudience = "isthmus-gateway-controller"
)

const (
	// ExplainPath returns an Explanation of the Service with namespace= and name=. It includes the answer of the cluster's
	// DNS if resolver= has its address.
	ExplainPath = "/explain"
	// ObservePath streams Events as lines of JSON, with empty lines as heartbeats. sample=N selects one in N events;
	// service=NAMESPACE/NAME, reason= and refused=true filter them.
	ObservePath = "/observe"
	// AskPath asks each server=, an address and port, whether it answers for clusterset.local; there may be up to MaxAsked.
	// It returns a list of ClusterDNS in the same order.
	AskPath = "/ask"
	// ShowPath returns a table; a name from ShowTables follows it in the path.
	ShowPath = "/show/"
)

// MaxAsked is the largest number of name servers in one request.
const MaxAsked = 32

// ShowTables returns the names of the tables that show the state of a node's dataplane.
func ShowTables() []string { return []string{"services", "backends", "connections", "hooks", "drops"} }

// DecodeTable decodes the table with a name from ShowTables.
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
	return nil, fmt.Errorf("there is no table %s", name)
}

func decodeTable[T tables.Table](body []byte) (tables.Table, error) {
	var t T
	err := json.Unmarshal(body, &t)
	return t, err
}

// Link is one link of the chain from a Service's name to its backends.
type Link struct {
	Link  string    `json:"link"`
	State LinkState `json:"state"`
	Text  string    `json:"text"`
	Fix   string    `json:"fix,omitempty"` // of a broken link
}

// LinkState is the state of a link.
type LinkState string

// The states of a link. A note is information; it is not an error.
const (
	LinkOK     LinkState = "ok"
	LinkBroken LinkState = "broken"
	LinkNote   LinkState = "note"
)

// Explanation is the state of one Service on one node.
type Explanation struct {
	Node      string              `json:"node"`
	Service   string              `json:"service"` // namespace/name
	Links     []Link              `json:"links"`   // in the order of the chain
	Endpoints []ExplainedEndpoint `json:"endpoints,omitempty"`
	Frontends []ExplainedFrontend `json:"frontends,omitempty"`
	// Chosen is the number of clients on this node that got a backend. Refused is the number of refused clients by reason.
	Chosen  uint64            `json:"chosen"`
	Refused map[string]uint64 `json:"refused,omitempty"`
}

// ExplainedEndpoint is an endpoint of a Service and its use by one node.
type ExplainedEndpoint struct {
	Address netip.Addr `json:"address"`
	Cluster string     `json:"cluster"`
	Node    string     `json:"node,omitempty"`
	State   string     `json:"state"` // "serves", "not ready", "terminating", "drained" or "stands by"
}

// ExplainedFrontend is a VIP, port and protocol in a node's BPF maps.
type ExplainedFrontend struct {
	VIP      netip.AddrPort   `json:"vip"`
	Protocol string           `json:"protocol"`
	State    string           `json:"state"` // "right", "missing", "wrong" or "taken"
	Backends []netip.AddrPort `json:"backends,omitempty"`
}

// Event is one client that got a backend or was refused. Unknown fields are left out.
type Event struct {
	Time     time.Time      `json:"time"`
	Node     string         `json:"node"`
	Verdict  string         `json:"verdict"` // "chosen" or "refused"
	Reason   string         `json:"reason,omitempty"`
	Path     string         `json:"path"` // "socket" or "packet"
	Protocol string         `json:"protocol"`
	Service  string         `json:"service,omitempty"` // namespace/name
	Client   netip.AddrPort `json:"client,omitzero"`   // unknown on the socket path, where the client has no address yet
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend,omitzero"`
	Cluster  string         `json:"cluster,omitempty"` // of the backend
	Netns    uint64         `json:"netns,omitempty"`   // cookie of the client's network namespace
	PID      uint32         `json:"pid,omitempty"`
	Command  string         `json:"command,omitempty"`
	// Lost is the number of events before this one that the client was too slow to read.
	Lost uint64 `json:"lost,omitempty"`
	// Error ends the stream. All other fields but Time and Node are then empty.
	Error string `json:"error,omitempty"`
}
