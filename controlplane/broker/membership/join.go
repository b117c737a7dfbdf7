package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// ErrIDTaken says that another cluster has joined under the id.
var ErrIDTaken = errors.New("cluster id is taken")

// Request is one cluster's wish to join.
type Request struct {
	// ClusterID may be empty where the cluster has a ClusterProperty that says it.
	ClusterID clusterset.ClusterID
	// Broker says where the broker is. Its token is not used.
	Broker BrokerInfo
	// Server is the URL at which the member reaches the broker; nil is what an earlier join said, and empty, or
	// nothing said ever, is that of Broker.
	Server *string
	// Namespace is where Isthmus is, or will be, installed in the member.
	Namespace string
	// ClusterSetIPEnabled says whether Services that this cluster exports get a ClusterSetIP without asking for
	// it; nil is what an earlier join said, or else what the ClusterSet does.
	ClusterSetIPEnabled *bool
	// Blocks the ClusterSetIPs shall come from, at most one a family; a family without one gets the
	// lowest free block. A cluster that joins again keeps its blocks.
	Blocks []netip.Prefix
	// Addresses that are nil are what an earlier join said, or else what is found in the cluster. Those that
	// are empty and not nil forget what an earlier one said.
	Addresses Addresses
}

// Joined is what became of a Request.
type Joined struct {
	Member   *v1alpha1.Member // as on the broker
	Rejoined bool             // the cluster had been registered before
	Sources  []Source         // of its addresses, in the order of the kinds
	Notes    []string         // what the person who asked should know, one sentence each
}

// Source is where addresses of one kind come from.
type Source struct {
	Kind string // pods, nodes, services or extra
	Found
}

// asBefore is the source of what a person gave at an earlier join.
const asBefore = "as given before"

// Join makes the cluster behind member a member of the ClusterSet of the broker: it registers id and
// addresses there, makes an account for the member, and puts the account's credentials, the definitions, its
// ClusterProperties and a copy of the registration into the member. It refuses an id that another cluster has
// (ErrIDTaken) and addresses that overlap (ErrOverlap); nothing has been written then. Doing it again, also
// after it was cut off, keeps blocks and join time, and what a person gave and does not give now.
func Join(ctx context.Context, broker, member client.Client, r Request) (Joined, error) {
	var j Joined
	if err := r.checkMember(ctx, member); err != nil {
		return j, err
	}
	config, err := readConfig(ctx, broker, r.Broker.Namespace)
	if err != nil {
		return j, err
	}
	if r.ClusterID, err = identify(ctx, member, r.ClusterID, config.Spec.ClusterSetID); err != nil {
		return j, err
	}
	uid, err := clusterUID(ctx, member)
	if err != nil {
		return j, err
	}
	found, err := discover(ctx, member)
	if err != nil {
		return j, err
	}
	before, err := knownServer(ctx, member, r.Namespace)
	if err != nil {
		return j, err
	}
	definitions, err := admin.PlanDefinitions(ctx, member)
	if err != nil {
		return j, fmt.Errorf("in the cluster that joins: %w", err)
	}
	if err := r.register(ctx, broker, uid, found, &j); err != nil {
		return j, err
	}
	token, err := openAccount(ctx, broker, r.Broker.Namespace, string(r.ClusterID))
	if err != nil {
		return j, err
	}
	switch given := strings.Split(j.Member.Annotations[annotationGiven], ","); {
	case r.Server != nil && *r.Server != "":
		r.Broker.Server = *r.Server
	case slices.Contains(given, flagServer) && before != "":
		r.Broker.Server = before
	}
	err = definitions.Apply(ctx, member)
	if err == nil {
		err = r.equip(ctx, member, token, config, &j)
	}
	if err != nil {
		return j, fmt.Errorf("in the cluster that joins: %w", err)
	}
	if err := prune(ctx, broker, r.Broker.Namespace, time.Now()); err != nil {
		j.Notes = append(j.Notes, "what members left long ago could not be tidied up, which does no harm: "+err.Error())
	}
	return j, nil
}

// flagServer is the flag of Request.Server.
const flagServer = "broker-server"

// knownServer returns the URL at which the member reaches its broker now, "" when it has none.
func knownServer(ctx context.Context, member client.Client, namespace string) (string, error) {
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerSecret}
	if err := member.Get(ctx, key, secret); err != nil {
		if admin.IsAbsent(err) {
			return "", nil
		}
		return "", fmt.Errorf("read Secret %s of the cluster that joins: %w", key, err)
	}
	cfg, err := clientcmd.Load(secret.Data[v1alpha1.BrokerSecretKubeconfig])
	if err != nil {
		return "", nil //nolint:nilerr // it is about to be replaced
	}
	if current := cfg.Contexts[cfg.CurrentContext]; current != nil && cfg.Clusters[current.Cluster] != nil {
		return cfg.Clusters[current.Cluster].Server, nil
	}
	return "", nil
}

// clusterUID returns what tells a cluster from all others.
func clusterUID(ctx context.Context, c client.Client) (string, error) {
	ns := &corev1.Namespace{}
	if err := c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns); err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster that joins: %w", metav1.NamespaceSystem, err)
	}
	return string(ns.UID), nil
}

// checkMember refuses a cluster that is a member under another id already: an id lasts as long as the
// membership (KEP-1645, "ClusterSet Membership").
func (r Request) checkMember(ctx context.Context, member client.Client) error {
	have := &v1alpha1.MemberList{}
	err := member.List(ctx, have, client.InNamespace(r.Namespace))
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("look for an earlier membership: %w", err)
	}
	for _, m := range have.Items {
		if r.ClusterID != "" && m.Name != string(r.ClusterID) {
			return fmt.Errorf("this cluster is member %s already; an id cannot change, so join as %s or let it leave first", m.Name, m.Name)
		}
	}
	return nil
}

// register puts the cluster into the broker's ledger.
func (r Request) register(ctx context.Context, broker client.Client, uid string, found discovery, j *Joined) error {
	id := string(r.ClusterID)
	m, err := register(ctx, broker, r.Broker.Namespace, id, func(l *ledger) (*v1alpha1.Member, error) {
		var err error
		if *j, err = r.decide(l, uid, found); err != nil {
			return nil, err
		}
		return j.Member, r.checkLegacy(ctx, broker, l, j.Member.Spec)
	})
	if err == nil {
		j.Member = m
	}
	return err
}

// decide says what to register, given what stands on the broker. It is pure but for the clock.
func (r Request) decide(l *ledger, uid string, found discovery) (Joined, error) {
	id := string(r.ClusterID)
	for _, c := range l.claims {
		if c.id == id && c.ClusterUID != uid {
			return Joined{}, fmt.Errorf("%w: another cluster joined as %s on %s; choose another --clusterid, or if that cluster is gone, isthmusctl leave --force %s",
				ErrIDTaken, id, c.Spec.JoinTime.UTC().Format(time.DateOnly), id)
		}
	}
	own := l.own(id)
	j := Joined{Rejoined: own != nil && own.registered}
	spec := v1alpha1.MemberSpec{
		ClusterID:           id,
		ClusterSetID:        l.config.Spec.ClusterSetID,
		ClusterSetIPEnabled: l.config.Spec.ClusterSetIPEnabled,
		JoinTime:            metav1.NewTime(time.Now().Truncate(time.Second)),
		Settings:            l.config.Spec.Settings,
	}
	given := r.addresses(&spec, own, found, &j)
	given = append(given, r.enabled(&spec, own)...)
	if r.Server != nil && *r.Server != "" || r.Server == nil && own.given(flagServer) {
		given = append(given, flagServer)
	}
	if len(spec.PodCIDRs) == 0 {
		return Joined{}, errors.New("no pod CIDR found on any node of the cluster; give --pod-cidr")
	}
	others := l.others(id)
	notes, err := checkAddresses(spec, parsed(l.config.Spec.ClusterSetIPCIDRRange), others)
	if err != nil {
		return Joined{}, err
	}
	j.Notes = append(j.Notes, notes...)
	if own != nil {
		spec.JoinTime, spec.ClusterSetIPCIDR = own.Spec.JoinTime, own.Spec.ClusterSetIPCIDR
		if asked := texts(r.Blocks); len(asked) > 0 && !containsAll(own.Spec.ClusterSetIPCIDR, asked) {
			j.Notes = append(j.Notes, fmt.Sprintf(
				"cluster %s keeps its ClusterSetIP blocks %s, and %s is ignored; isthmusctl member set %s --clusterset-ip-cidr changes them",
				id, strings.Join(own.Spec.ClusterSetIPCIDR, ", "), strings.Join(asked, ", "), id))
		}
	} else {
		blocks, err := chooseBlocks(l.config.Spec, r.Blocks, parsed(l.gone[id].ClusterSetIPCIDR), others)
		if err != nil {
			return Joined{}, err
		}
		spec.ClusterSetIPCIDR = texts(blocks)
	}
	j.Member = registration(r.Broker.Namespace, uid, given, spec)
	return j, nil
}

// registration returns a Member as it stands on the broker.
func registration(namespace, uid string, given []string, spec v1alpha1.MemberSpec) *v1alpha1.Member {
	m := &v1alpha1.Member{ObjectMeta: named(namespace, spec.ClusterID, spec.ClusterID), Spec: spec}
	slices.Sort(given)
	m.Annotations = map[string]string{annotationClusterUID: uid, annotationGiven: strings.Join(slices.Compact(given), ",")}
	return m
}

// addresses sets those of spec, each kind to what is given, what was given before, or what was found, and
// returns the flags whose values people gave.
func (r Request) addresses(spec *v1alpha1.MemberSpec, own *claim, found discovery, j *Joined) (given []string) {
	var before v1alpha1.MemberSpec
	if own != nil {
		before = own.Spec
	}
	onlyNodes := false
	for _, kind := range []struct {
		name, flag string
		given      []netip.Prefix
		before     []string
		found      []Found
		set        *[]string
	}{
		{"pods", "pod-cidr", r.Addresses.Pods, before.PodCIDRs, found.pods, &spec.PodCIDRs},
		{"nodes", "node-cidr", r.Addresses.Nodes, before.NodeCIDRs, found.nodes, &spec.NodeCIDRs},
		{"services", "service-cidr", r.Addresses.Services, before.ServiceCIDRs, found.services, &spec.ServiceCIDRs},
		{"extra", "extra-cidr", r.Addresses.Extra, before.ExtraCIDRs, nil, &spec.ExtraCIDRs},
	} {
		from := kind.found
		switch {
		case len(kind.given) > 0:
			from = []Found{{kind.given, "--" + kind.flag}}
		case kind.given == nil && own.given(kind.flag):
			from = []Found{{parsed(kind.before), asBefore}}
		default:
			onlyNodes = onlyNodes || kind.name == "pods" && len(from) == 1 && from[0].From == fromNodes
		}
		if len(kind.given) > 0 || kind.given == nil && own.given(kind.flag) {
			given = append(given, kind.flag)
		}
		*kind.set = texts(prefixes(from))
		for _, f := range from {
			j.Sources = append(j.Sources, Source{kind.name, f})
		}
	}
	if onlyNodes {
		j.Notes = append(j.Notes, "only the nodes of now tell the pod CIDRs, so no other member will believe the pods of a node that is added later; give --pod-cidr the CIDR of all of them")
	}
	return given
}

// enabled sets whether exports get ClusterSetIPs, and returns the flag if a person gave it.
func (r Request) enabled(spec *v1alpha1.MemberSpec, own *claim) (given []string) {
	const flag = "enable-clusterset-ip"
	switch {
	case r.ClusterSetIPEnabled != nil:
		spec.ClusterSetIPEnabled = *r.ClusterSetIPEnabled
	case own.given(flag):
		spec.ClusterSetIPEnabled = own.Spec.ClusterSetIPEnabled
	default:
		return nil
	}
	return []string{flag}
}

// given reports whether a person gave the value of a flag when c was registered.
func (c *claim) given(flag string) bool {
	return c != nil && slices.Contains(strings.Split(c.Given, ","), flag)
}

// checkLegacy refuses an id under which an earlier member gave addresses that Services still have and that
// are not in spec's blocks: everybody would take them for stolen.
func (r Request) checkLegacy(ctx context.Context, broker client.Client, l *ledger, spec v1alpha1.MemberSpec) error {
	if own := l.own(spec.ClusterID); own != nil && own.registered {
		return nil
	}
	held, err := allocatedOutside(ctx, broker, r.Broker.Namespace, spec)
	if err != nil || len(held) == 0 {
		return err
	}
	return fmt.Errorf("%w: an earlier member %s gave ClusterSetIPs that are in use, to %s, and its block is another member's now; choose another --clusterid", ErrIDTaken, spec.ClusterID, admin.Some(held))
}

// allocatedOutside returns the Services, as namespace/name, whose ClusterSetIP the member of spec has allocated
// outside of the blocks of spec.
func allocatedOutside(ctx context.Context, broker client.Client, namespace string, spec v1alpha1.MemberSpec) ([]string, error) {
	aggregates := &mcsv1beta1.ServiceImportList{}
	if err := broker.List(ctx, aggregates, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list aggregates on the broker: %w", err)
	}
	blocks := parsed(spec.ClusterSetIPCIDR)
	var held []string
	for _, a := range aggregates.Items {
		if a.Annotations[v1alpha1.AnnotationAllocatedBy] != spec.ClusterID {
			continue
		}
		outside := func(text string) bool {
			ip, err := netip.ParseAddr(text)
			return err == nil && !slices.ContainsFunc(blocks, func(b netip.Prefix) bool { return b.Contains(ip) })
		}
		if slices.ContainsFunc(a.Spec.IPs, outside) {
			held = append(held, a.Labels[v1alpha1.LabelServiceNamespace]+"/"+a.Labels[v1alpha1.LabelServiceName])
		}
	}
	slices.Sort(held)
	return held, nil
}

// equip puts into the member what its controller needs, and what the cluster says of itself.
func (r Request) equip(ctx context.Context, member client.Client, token string, config *v1alpha1.ClusterSetConfig, j *Joined) error {
	kubeconfig, err := r.Broker.kubeconfig()
	if err != nil {
		return err
	}
	copied := &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.Namespace, Name: j.Member.Name, Labels: j.Member.Labels,
			Annotations: map[string]string{
				annotationClusterUID: j.Member.Annotations[annotationClusterUID],
				annotationBroker:     fmt.Sprintf("%s/%s", config.Namespace, config.UID),
			},
		},
		Spec: j.Member.Spec,
	}
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.Namespace}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: v1alpha1.BrokerSecret, Labels: admin.Ours()},
			Data:       map[string][]byte{v1alpha1.BrokerSecretKubeconfig: kubeconfig, v1alpha1.BrokerSecretToken: []byte(token)},
		},
		copied,
	} {
		if err := admin.Apply(ctx, member, obj); err != nil {
			return err
		}
	}
	notes, err := setProperties(ctx, member, j.Member.Spec)
	if err != nil {
		return err
	}
	j.Notes = append(j.Notes, notes...)
	return resumeController(ctx, member, r.Namespace)
}

func containsAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}
