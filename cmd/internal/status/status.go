// Package status defines the JSON that isthmus-agent (port [AgentPort]) and isthmus-controller (port [ControllerPort])
// serve over HTTP, and that isthmusctl reads. Fields are only ever added, so that an older isthmusctl can read a newer
// process.
package status

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Path is the path of the status, besides /healthz, /readyz and /metrics.
const Path = "/status"

// The default ports of the processes. In a pod, the port is named PortName or PlainPortName.
const (
	AgentPort      = 9470
	ControllerPort = v1alpha1.ControllerPort
	// GatewayControllerPort is the port of isthmus-gateway-controller, which has no status.
	GatewayControllerPort = 9472
	// PortName is the name of the port, and PlainPortName its name if it serves plain HTTP.
	PortName      = "https"
	PlainPortName = "http"
)

// AgentSelector is the label of the agents' DaemonSet in the installation namespace, and of its pods. Its name depends on the chart's
// fullnameOverride.
const AgentSelector = "app.kubernetes.io/name=isthmus-agent"

// Agent is the status of one node's agent.
type Agent struct {
	Version string `json:"version"`
	Node    string `json:"node"`
	// Ready is true if Waiting is empty.
	Ready bool `json:"ready"`
	// Waiting lists what is not ready yet, one sentence each.
	Waiting   []string  `json:"waiting,omitempty"`
	View      View      `json:"view"`
	Dataplane Dataplane `json:"dataplane"`
	DNS       DNS       `json:"dns"`
	// MissingCapabilities lists the optional capabilities that this node lacks, each with the fix.
	MissingCapabilities []string `json:"missingCapabilities,omitempty"`
}

// View is the state of the agent's caches of the API server.
type View struct {
	Synced   bool      `json:"synced"`
	Built    time.Time `json:"built,omitzero"` // time of the last snapshot
	Services int       `json:"services"`
	Error    string    `json:"error,omitempty"` // of the last failed watch
	// LabelsReserved reports whether an admission policy reserves the labels by which the agent knows the objects of Isthmus.
	// It is nil while that is unknown, and for an agent that serves the objects of any implementation.
	LabelsReserved *bool `json:"labelsReserved,omitempty"`
}

// Dataplane is the state of the node's BPF programs and maps.
type Dataplane struct {
	Hooks     []Hook    `json:"hooks"`
	Frontends int       `json:"frontends"`
	Backends  int       `json:"backends"`
	Writes    uint64    `json:"writes"` // map writes since the agent started
	Synced    time.Time `json:"synced,omitzero"`
	Error     string    `json:"error,omitempty"`
	Problems  []string  `json:"problems,omitempty"` // Services that cannot be programmed as specified, and why
	// ProblemReasons counts Problems by reason.
	ProblemReasons map[string]int `json:"problemReasons,omitempty"`
	// Drained lists the members that do not answer packets from this node.
	Drained []string `json:"drained,omitempty"`
	// Differences is the number of entries of the BPF maps that the last check, at Checked, found changed, and corrected.
	Differences int       `json:"differences"`
	Checked     time.Time `json:"checked,omitzero"`
	// Refusals counts the clients refused since the BPF maps were created, by reason.
	Refusals map[string]uint64 `json:"refusals,omitempty"`
}

// Hook is one BPF program.
type Hook struct {
	Name     string `json:"name"`
	Attached bool   `json:"attached"`
}

// DNS is the status of the node's name server.
type DNS struct {
	Listening []string  `json:"listening"`
	Interface string    `json:"interface,omitempty"` // with the node-local addresses
	Records   int       `json:"records"`
	Synced    time.Time `json:"synced,omitzero"`
	Error     string    `json:"error,omitempty"`
	// Cluster is the result of the last question to the cluster's DNS, which pods use; nil while unknown.
	Cluster *ClusterDNS `json:"cluster,omitempty"`
	// Kernel counts the answers of the kernel; nil while it answers nothing.
	Kernel *KernelDNS `json:"kernel,omitempty"`
}

// KernelDNS is the status of the answers from the kernel.
type KernelDNS struct {
	Resolvers []string `json:"resolvers"` // for which the kernel answers
	Devices   int      `json:"devices"`   // of pods, with the program
	Answers   uint64   `json:"answers"`
}

// ClusterDNS reports whether a cluster's DNS answers for clusterset.local, as seen from one node.
type ClusterDNS struct {
	Server  string    `json:"server"`
	Answers bool      `json:"answers"`
	Since   time.Time `json:"since,omitzero"`   // of Answers
	Reason  string    `json:"reason,omitempty"` // why it does not answer
}

// Controller is the status of one replica of the controller of a member.
type Controller struct {
	Version string `json:"version"`
	Cluster string `json:"cluster"`
	Leader  bool   `json:"leader"`
	// Ready is true if Waiting is empty.
	Ready   bool     `json:"ready"`
	Waiting []string `json:"waiting,omitempty"`
	Broker  Broker   `json:"broker"`
	// Members are the other members of the ClusterSet, sorted by id.
	Members []Member `json:"members,omitempty"`
	// Federation is nil in a cluster that is in no federation.
	Federation *Federation `json:"federation,omitempty"`
}

// Federation is the status of a cluster in a federation.
type Federation struct {
	Cluster string             `json:"cluster,omitempty"`
	Problem string             `json:"problem,omitempty"` // why the cluster cannot act in the federation, and the fix
	Members []FederationMember `json:"members,omitempty"` // sorted by id; empty in a cluster that supervises none
	// Clouds lists the clouds whose servers and load balancers are endpoints of Services; empty in a process that does not manage them.
	Clouds []Cloud `json:"clouds,omitempty"`
	// MachineProblems lists the machines that cannot be offered as specified, and the fix, sorted.
	MachineProblems []string `json:"machineProblems,omitempty"`
}

// Cloud is one project in a cloud.
type Cloud struct {
	Name          string `json:"name"`
	Servers       int    `json:"servers"`                 // that are endpoints of Services
	LoadBalancers int    `json:"loadBalancers,omitempty"` // that are endpoints of Services
	Error         string `json:"error,omitempty"`         // of the last requests; the results of the last successful ones stay
}

// FederationMember is a member of a federation as seen by a supervisor.
type FederationMember struct {
	ID        string `json:"id"`
	Leader    string `json:"leader,omitempty"` // CLUSTER/POD
	Leading   bool   `json:"leading"`          // this process is the leader
	Epoch     int64  `json:"epoch"`            // number of leader changes
	Reachable bool   `json:"reachable"`
	Problem   string `json:"problem,omitempty"` // why it is unreachable, and the fix
}

// Member is the state of another member as seen by a controller.
type Member struct {
	ID    string      `json:"id"`
	State MemberState `json:"state"`
	Since time.Time   `json:"since,omitzero"` // of State
	// Held is the number of its Services that are kept although they were withdrawn, because too many were at once.
	Held int `json:"held,omitempty"`
}

// MemberState is the liveness of a member.
type MemberState string

// The states of a member. A stale member has not renewed its Lease for a while; its endpoints stay. The endpoints of a dead
// member are removed.
const (
	MemberLive  MemberState = "live"
	MemberStale MemberState = "stale"
	MemberDead  MemberState = "dead"
)

// Broker is the state of a controller's connection to the broker.
type Broker struct {
	Server    string    `json:"server"`
	Namespace string    `json:"namespace"`
	Reachable bool      `json:"reachable"`
	Seen      time.Time `json:"seen,omitzero"` // time of its last answer
	Error     string    `json:"error,omitempty"`
	// Credential is the member's token for the broker; nil if the controller does not renew it.
	Credential *Credential `json:"credential,omitempty"`
}

// Credential is a member's token for the broker.
type Credential struct {
	Expires time.Time `json:"expires,omitzero"` // zero if it does not expire
	Error   string    `json:"error,omitempty"`  // why it is not renewed, or has ended
}

// Handler serves the result of current as JSON. It calls current for each request, from several goroutines.
func Handler[T Agent | Controller](current func() T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.MarshalIndent(current(), "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(body, '\n')) // an error means that the client is gone
	})
}
