package broker

import (
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
)

// State describes a running Controller.
type State struct {
	Cluster clusterset.ClusterID
	Leader  bool // it is the active replica
	Broker  Broker
	Members []Member // the other members, sorted by id
}

// Member describes another member as this one sees it.
type Member struct {
	ID    clusterset.ClusterID
	State liveness.State
	Since time.Time // the beginning of State; zero if it never changed
	Held  int       // held exports and slices: they vanished from the broker and stay imported
}

// Broker describes the connection to the broker.
type Broker struct {
	Server, Namespace string
	Seen              time.Time // the last successful answer; zero without one
	Err               error     // the current fault and its remedy; nil while the broker answers
	Credential        Credential
}

// Credential describes the member's token for the broker.
type Credential struct {
	Renewed bool      // the controller renews it
	Expires time.Time // zero if it does not expire
	Err     error     // the reason why it is not renewed, or has ended; nil without a fault
}

// State returns the current State. Any goroutine may call it at any time.
func (c *Controller) State() State {
	reach := c.probe.Reach()
	s := State{
		Cluster: c.cluster,
		Broker:  Broker{Server: c.cfg.Broker.Host, Namespace: c.cfg.BrokerNamespace, Seen: reach.Seen, Err: reach.Err},
	}
	token := c.renewer.State()
	s.Broker.Credential = Credential{Renewed: token.Managed, Expires: token.Expires, Err: token.Err}
	select {
	case <-c.manager.Elected():
		s.Leader = true
	default:
	}
	held := map[clusterset.ClusterID]int{}
	for _, h := range c.broker.Holds() {
		held[h.Source] += h.Count
	}
	for _, id := range c.broker.Members() {
		if id == c.cluster {
			continue
		}
		state, since := c.members.State(id)
		s.Members = append(s.Members, Member{ID: id, State: state, Since: since, Held: held[id]})
	}
	return s
}
