// Package status is what Isthmus's processes say about themselves over HTTP, and what isthmusctl reads
// back: the shapes served as JSON at [Path] by isthmus-agent (port [AgentPort]) and isthmus-controller
// (port [ControllerPort]). Fields are only ever added, so an older isthmusctl reads a newer process.
package status

import (
	"encoding/json"
	"net/http"
	"time"
)

// Path is where a process serves its status, beside /healthz, /readyz and /metrics.
const Path = "/status"

// The default ports of the processes. In a pod, the port is named PortName.
const (
	AgentPort      = 9470
	ControllerPort = 9471
	// GatewayControllerPort is that of isthmus-gateway-controller, which has no status.
	GatewayControllerPort = 9472
	PortName              = "http"
)

// Names of the workloads in the installation namespace, and of the label that their pods carry.
const (
	AgentDaemonSet       = "isthmus-agent"
	ControllerDeployment = "isthmus-controller"
	LabelName            = "app.kubernetes.io/name"
)

// Agent is what one node's agent says.
type Agent struct {
	Version string `json:"version"`
	Node    string `json:"node"`
	// Ready is true when Waiting is empty.
	Ready bool `json:"ready"`
	// Waiting names what is not ready yet, one sentence each.
	Waiting   []string  `json:"waiting,omitempty"`
	View      View      `json:"view"`
	Dataplane Dataplane `json:"dataplane"`
	DNS       DNS       `json:"dns"`
	// MissingCapabilities names optional abilities this node lacks, each with what it would give.
	MissingCapabilities []string `json:"missingCapabilities,omitempty"`
}

// View is what the agent has read from the API server.
type View struct {
	Synced   bool      `json:"synced"`
	Built    time.Time `json:"built,omitzero"` // when the last snapshot was made
	Services int       `json:"services"`
	Error    string    `json:"error,omitempty"` // why a watch does not work, if it does not
}

// Dataplane is what stands in the node's kernel.
type Dataplane struct {
	Hooks     []Hook    `json:"hooks"`
	Frontends int       `json:"frontends"`
	Backends  int       `json:"backends"`
	Writes    uint64    `json:"writes"` // map writes since the agent started
	Synced    time.Time `json:"synced,omitzero"`
	Error     string    `json:"error,omitempty"`
	Problems  []string  `json:"problems,omitempty"` // Services that cannot be programmed as asked, and why
	// Drained are the members whose packets die, as this node sees them.
	Drained []string `json:"drained,omitempty"`
	// Differences is how many entries of the kernel's maps the last check, at Checked, found to be other than the agent
	// wrote them. They were put right.
	Differences int       `json:"differences"`
	Checked     time.Time `json:"checked,omitzero"`
	// Refusals counts the clients refused since the maps were made, by reason.
	Refusals map[string]uint64 `json:"refusals,omitempty"`
}

// Hook is one program in the node's kernel.
type Hook struct {
	Name     string `json:"name"`
	Attached bool   `json:"attached"`
}

// DNS is what the node's name server answers from.
type DNS struct {
	Listening []string  `json:"listening"`
	Interface string    `json:"interface,omitempty"` // which carries the node-local addresses
	Names     int       `json:"names"`
	Synced    time.Time `json:"synced,omitzero"`
	Error     string    `json:"error,omitempty"`
	// Cluster is how the cluster's own DNS, which pods ask, does with clusterset.local; nil when that is not known.
	Cluster *ClusterDNS `json:"cluster,omitempty"`
	// Kernel is what the kernel answers by itself; nil while it answers nothing.
	Kernel *KernelDNS `json:"kernel,omitempty"`
}

// KernelDNS is what a node's kernel answers before questions reach a resolver.
type KernelDNS struct {
	Resolvers []string `json:"resolvers"` // which pods ask
	Devices   int      `json:"devices"`   // of pods
	Answers   uint64   `json:"answers"`
}

// ClusterDNS is whether a cluster's DNS answers for clusterset.local, as seen from one node.
type ClusterDNS struct {
	Server  string    `json:"server"`
	Answers bool      `json:"answers"`
	Since   time.Time `json:"since,omitzero"`   // of that
	Reason  string    `json:"reason,omitempty"` // why it does not
}

// Controller is what one replica of the member's controller says.
type Controller struct {
	Version string `json:"version"`
	Cluster string `json:"cluster"`
	Leader  bool   `json:"leader"`
	// Ready is true when Waiting is empty.
	Ready   bool     `json:"ready"`
	Waiting []string `json:"waiting,omitempty"`
	Broker  Broker   `json:"broker"`
	// Members are the other members of the ClusterSet, sorted by id.
	Members []Member `json:"members,omitempty"`
	// Federation is nil in a cluster that takes no part in one.
	Federation *Federation `json:"federation,omitempty"`
}

// Federation is how a cluster does its part in a federation.
type Federation struct {
	Cluster string             `json:"cluster,omitempty"`
	Problem string             `json:"problem,omitempty"` // why it does not, and what to do
	Members []FederationMember `json:"members,omitempty"` // sorted by id; none in a cluster that leads nobody
	// Clouds are those whose servers stand behind Services; none in a process that does not keep these.
	Clouds []Cloud `json:"clouds,omitempty"`
	// MachineProblems are why machines are not offered as they ask, each with what to do, sorted.
	MachineProblems []string `json:"machineProblems,omitempty"`
}

// Cloud is one project of a cloud.
type Cloud struct {
	Name    string `json:"name"`
	Servers int    `json:"servers"`         // that stand behind Services
	Error   string `json:"error,omitempty"` // why it was not read when it was last asked; what it said before counts on
}

// FederationMember is how a member of a federation looks from a supervisor.
type FederationMember struct {
	ID        string `json:"id"`
	Leader    string `json:"leader,omitempty"` // CLUSTER/POD
	Leading   bool   `json:"leading"`          // it is this process
	Epoch     int64  `json:"epoch"`            // how often the leader has changed
	Reachable bool   `json:"reachable"`
	Problem   string `json:"problem,omitempty"` // why it is not reachable, and what to do
}

// Member is how another member fares, as far as a controller can tell.
type Member struct {
	ID    string      `json:"id"`
	State MemberState `json:"state"`
	Since time.Time   `json:"since,omitzero"` // of the state
	// Held is how many of its Services are kept here although they vanished, because too much vanished at once.
	Held int `json:"held,omitempty"`
}

// MemberState says whether a member lives.
type MemberState string

// A stale member has not renewed its Lease for a while and its endpoints stay; those of a dead one are gone.
const (
	MemberLive  MemberState = "live"
	MemberStale MemberState = "stale"
	MemberDead  MemberState = "dead"
)

// Broker is how a controller gets on with the broker.
type Broker struct {
	Server    string    `json:"server"`
	Namespace string    `json:"namespace"`
	Reachable bool      `json:"reachable"`
	Seen      time.Time `json:"seen,omitzero"` // the last time it answered
	Error     string    `json:"error,omitempty"`
}

// Handler serves what current returns as JSON. current is called for every request, from any goroutine.
func Handler[T Agent | Controller](current func() T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.MarshalIndent(current(), "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(body, '\n')) // the reader went away: nobody to tell
	})
}
