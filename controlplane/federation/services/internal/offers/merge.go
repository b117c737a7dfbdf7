package offers

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Federated is a federated Service, the same in all clusters.
type Federated struct {
	Ports     []clusterset.Port // with distinct names; one port alone may have none
	Families  []clusterset.Family
	Affinity  clusterset.SessionAffinity
	Clusters  []clusterset.ClusterID // with offers, sorted
	First     string                 // the Mark of the oldest offer
	Conflicts []Conflict
}

// Conflict is a port of a member Service that the federated Service leaves out, because it contradicts a port of an older
// member Service.
type Conflict struct {
	Cluster clusterset.ClusterID
	Service clusterset.ServiceName
	Port    clusterset.Port
	// Winner is the older port, of the Service By in the cluster In.
	Winner clusterset.Port
	In     clusterset.ClusterID
	By     clusterset.ServiceName
}

// Message returns a sentence for users. It is the same for the same conflict.
func (c Conflict) Message() string {
	return fmt.Sprintf("port %s of service %s in cluster %s is left out: service %s in cluster %s is older and has %s; make them the same",
		portText(c.Port), c.Service, c.Cluster, c.By, c.In, portText(c.Winner))
}

// Mark names the member Service of an offer, as CLUSTER/NAMESPACE/NAME.
func (o Offer) Mark() string { return string(o.Cluster) + "/" + o.Service.String() }

// KeepFirst lets the offer that was first so far stay first, whatever the clocks of clusters say about ages: a member that joins
// later, in a cluster whose clock is behind, changes nothing for the clients of others. marks are those on the federated Services of
// all clusters. If they differ, such as after a partition, the most frequent one counts, and of these the lowest.
func KeepFirst(all []Offer, marks []string) {
	votes := map[string]int{}
	for _, mark := range marks {
		if slices.ContainsFunc(all, func(o Offer) bool { return o.Mark() == mark }) {
			votes[mark]++
		}
	}
	first := ""
	for mark, n := range votes {
		if first == "" || n > votes[first] || n == votes[first] && mark < first {
			first = mark
		}
	}
	for i := range all {
		if all[i].Mark() == first {
			all[i].ExportedAt = time.Time{}.Add(1) // offers for kept clusters are older
		}
	}
}

func portText(p clusterset.Port) string {
	if p.Name == "" {
		return fmt.Sprintf("%d/%s", p.Port, p.Protocol)
	}
	return fmt.Sprintf("%d/%s (%s)", p.Port, p.Protocol, p.Name)
}

// number identifies a port to clients.
type number struct {
	port     uint16
	protocol clusterset.Protocol
}

func numberOf(p clusterset.Port) number { return number{p.Port, p.Protocol} }

// Merge joins the offers of one name; their order does not matter. A port is identified by its number and protocol. Names,
// session affinity and the first family come from the oldest member Service; ties go to the lower cluster id and then to
// the lower name. Each member may add ports. A port is left out, as a Conflict, when an older member Service has its number
// only with another protocol, or has its name for another number or protocol.
func Merge(all []Offer) Federated {
	byAge := slices.SortedFunc(slices.Values(all), func(a, b Offer) int {
		return cmp.Or(a.ExportedAt.Compare(b.ExportedAt), strings.Compare(string(a.Cluster), string(b.Cluster)), a.Service.Compare(b.Service))
	})
	var fed Federated
	type origin struct {
		clusterset.Port

		from Offer
	}
	var taken []origin
	for i, o := range byAge {
		if i == 0 {
			fed.Affinity, fed.First = o.SessionAffinity, o.Mark()
		}
		older := len(taken) // ports of one Service do not conflict with each other
		for _, p := range o.Ports {
			same := func(q origin) bool { return numberOf(q.Port) == numberOf(p) }
			if slices.ContainsFunc(taken[:older], same) {
				continue
			}
			clash := slices.IndexFunc(taken[:older], func(q origin) bool {
				return q.Port.Port == p.Port || p.Name != "" && q.Name == p.Name
			})
			if clash < 0 {
				taken = append(taken, origin{p, o})
				continue
			}
			winner := taken[clash]
			fed.Conflicts = append(fed.Conflicts, Conflict{
				Cluster: o.Cluster, Service: o.Service, Port: p, Winner: winner.Port, In: winner.from.Cluster, By: winner.from.Service,
			})
		}
		for _, f := range o.Families {
			if !slices.Contains(fed.Families, f) {
				fed.Families = append(fed.Families, f)
			}
		}
		fed.Clusters = append(fed.Clusters, o.Cluster)
	}
	for _, t := range taken {
		fed.Ports = append(fed.Ports, t.Port)
	}
	nameAll(fed.Ports)
	slices.Sort(fed.Clusters)
	fed.Clusters = slices.Compact(fed.Clusters)
	return fed
}

// nameAll names unnamed ports if there are several, as Kubernetes requires.
func nameAll(ports []clusterset.Port) {
	if len(ports) < 2 {
		return
	}
	for i, p := range ports {
		if p.Name != "" {
			continue
		}
		name := fmt.Sprintf("%s-%d", strings.ToLower(p.Protocol.String()), p.Port)
		for slices.ContainsFunc(ports, func(q clusterset.Port) bool { return q.Name == name }) {
			name += "x"
		}
		ports[i].Name = name
	}
}
