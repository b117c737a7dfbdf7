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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// ErrIDTaken means that another cluster has the id.
var ErrIDTaken = errors.New("cluster id is taken")

// Request describes a cluster that joins.
type Request struct {
	// ClusterID may be empty if the cluster has a ClusterProperty with its id.
	ClusterID clusterset.ClusterID
	// Broker identifies the broker. Its token is not used. With a ClusterID it is an invitation.
	Broker BrokerInfo
	// Server is the URL of the broker for the member. Nil keeps the URL of an earlier join; empty, or no earlier one, means
	// that of Broker.
	Server *string
	// Namespace is the installation namespace of Isthmus in the member, which need not exist.
	Namespace string
	// ClusterSetIPEnabled gives exported Services a ClusterSetIP by default. Nil keeps the value of an earlier join, or else
	// that of the ClusterSet.
	ClusterSetIPEnabled *bool
	// Blocks are the requested ClusterSetIP blocks, at most one per family; other families get the lowest free block. A
	// cluster that joins again keeps its blocks.
	Blocks []netip.Prefix
	// Addresses that are nil keep those of an earlier join, or else are discovered. Empty ones that are not nil are
	// discovered again.
	Addresses Addresses
}

// Joined is the result of Join.
type Joined struct {
	Member   *v1alpha1.Member // as on the broker
	Rejoined bool             // the cluster was registered before
	Sources  []Source         // of its addresses, by kind
	Notes    []string         // for the administrator, one sentence each
}

// Source is the source of addresses of one kind.
type Source struct {
	Kind string // pods, nodes, services, extra or supernets
	Found
}

// asBefore is the source of addresses that the administrator gave at an earlier join.
const asBefore = "as given before"

// Join makes the cluster behind member a member of the broker's ClusterSet. It registers id and addresses on the broker and
// requests a token there, for an account that Invite has created or that it creates. It writes the credentials, the definitions, the ClusterProperties and a copy of the
// registration into the member. It refuses an id that another cluster has (ErrIDTaken) and overlapping addresses
// (ErrOverlap) before it writes anything. A repeated or resumed Join keeps the blocks, the join time, and the values that
// the administrator gave before and does not give now. At its end it deletes the invitation.
func Join(ctx context.Context, broker, member client.Client, r Request) (Joined, error) {
	var j Joined
	if err := r.invitedAs(); err != nil {
		return j, err
	}
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
	before, err := currentServer(ctx, member, r.Namespace)
	if err != nil {
		return j, err
	}
	definitions, err := admin.PlanDefinitions(ctx, member)
	if err != nil {
		return j, fmt.Errorf("in the cluster that joins: %w", err)
	}
	token, err := r.register(ctx, broker, config, uid, found, &j)
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
		err = r.configureMember(ctx, member, token, config, &j)
	}
	if err != nil {
		return j, fmt.Errorf("in the cluster that joins: %w", err)
	}
	if r.Broker.ClusterID != "" {
		if err := endInvitation(ctx, broker, r.Broker.Namespace, r.Broker.ClusterID); err != nil {
			j.Notes = append(j.Notes, fmt.Sprintf("the invitation could not be ended, and stays valid until %s: %s", r.Broker.Expires.Format(time.RFC3339), err))
		}
	}
	return j, nil
}

// invitedAs sets the id to that of an invitation, and refuses another one.
func (r *Request) invitedAs() error {
	invited := clusterset.ClusterID(r.Broker.ClusterID)
	if invited == "" || r.ClusterID == invited {
		return nil
	}
	if r.ClusterID != "" {
		return fmt.Errorf("the invitation is for cluster %s, not for %s; run isthmusctl invite %s on the broker", invited, r.ClusterID, r.ClusterID)
	}
	r.ClusterID = invited
	return nil
}

// flagServer is the flag of Request.Server.
const flagServer = "broker-server"

// currentServer returns the present URL of the member's broker, "" without one.
func currentServer(ctx context.Context, member client.Client, namespace string) (string, error) {
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
		return "", nil //nolint:nilerr // Join replaces it
	}
	if current := cfg.Contexts[cfg.CurrentContext]; current != nil && cfg.Clusters[current.Cluster] != nil {
		return cfg.Clusters[current.Cluster].Server, nil
	}
	return "", nil
}

// clusterUID returns the unique identity of a cluster.
func clusterUID(ctx context.Context, c client.Client) (string, error) {
	ns := &corev1.Namespace{}
	if err := c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns); err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster that joins: %w", metav1.NamespaceSystem, err)
	}
	return string(ns.UID), nil
}

// checkMember refuses a cluster that is already a member with another id, which is immutable during a membership (KEP-1645,
// "ClusterSet Membership").
func (r Request) checkMember(ctx context.Context, member client.Client) error {
	have := &v1alpha1.MemberList{}
	err := member.List(ctx, have, client.InNamespace(r.Namespace))
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("list Members: %w", err)
	}
	for _, m := range have.Items {
		if r.ClusterID != "" && m.Name != string(r.ClusterID) {
			return fmt.Errorf("this cluster is member %s already; an id cannot change, so join as %s or let it leave first", m.Name, m.Name)
		}
	}
	return nil
}

// register registers the cluster on the broker and returns its first token.
func (r Request) register(ctx context.Context, broker client.Client, config *v1alpha1.ClusterSetConfig, uid string, found discovery, j *Joined) (token string, err error) {
	id, namespace, lifetime := string(r.ClusterID), r.Broker.Namespace, config.Spec.CredentialLifetime()
	decide := func(all *reservations) (*v1alpha1.Member, error) {
		var err error
		*j, err = r.decide(all, uid, found)
		return j.Member, err
	}
	if r.Broker.ClusterID != "" {
		all, err := readReservations(ctx, broker, namespace)
		if err != nil {
			return "", err
		}
		if _, err := decide(all); err != nil {
			return "", fmt.Errorf("register cluster %s: %w", id, err)
		}
		if err := settled(ctx, func() error { return admin.Apply(ctx, broker, j.Member) }); err != nil {
			return "", err
		}
		return requestToken(ctx, broker, namespace, id, all.config.Spec.Credential(id), lifetime)
	}
	m, err := register(ctx, broker, namespace, id, func(all *reservations) (*v1alpha1.Member, error) {
		if _, err := decide(all); err != nil {
			return nil, err
		}
		return j.Member, checkFormerMember(ctx, broker, namespace, all, j.Member.Spec)
	}, func(credential string) error {
		if err := createAccount(ctx, broker, namespace, id, credential); err != nil {
			return err
		}
		token, err = requestToken(ctx, broker, namespace, id, credential, lifetime)
		return err
	})
	if err == nil {
		j.Member = m
	}
	return token, err
}

// decide derives the registration from the reservations on the broker. It is pure but for the clock.
func (r Request) decide(all *reservations, uid string, found discovery) (Joined, error) {
	id := string(r.ClusterID)
	for _, c := range all.claims {
		if c.id == id && !c.mayBecome(uid) {
			return Joined{}, fmt.Errorf("%w: another cluster joined as %s on %s; choose another --clusterid, or if that cluster is gone, isthmusctl leave --force %s",
				ErrIDTaken, id, c.Spec.JoinTime.UTC().Format(time.DateOnly), id)
		}
	}
	own := all.own(id)
	j := Joined{Rejoined: own != nil && own.registered}
	spec := v1alpha1.MemberSpec{
		ClusterID:           id,
		ClusterSetID:        all.config.Spec.ClusterSetID,
		ClusterSetIPEnabled: all.config.Spec.ClusterSetIPEnabled,
		JoinTime:            metav1.NewTime(time.Now().Truncate(time.Second)),
		Settings:            all.config.Spec.Settings,
	}
	given := r.addresses(&spec, own, found, &j)
	given = append(given, r.enabled(&spec, own)...)
	if r.Server != nil && *r.Server != "" || r.Server == nil && own.given(flagServer) {
		given = append(given, flagServer)
	}
	if len(spec.PodCIDRs) == 0 {
		return Joined{}, errors.New("no pod CIDR found on any node of the cluster; give --pod-cidr")
	}
	others := all.others(id)
	notes, err := checkAddresses(spec, parsed(all.config.Spec.ClusterSetIPCIDRRange), others)
	if err != nil {
		return Joined{}, err
	}
	j.Notes = append(j.Notes, notes...)
	if own != nil {
		spec.ClusterSetIPCIDR = own.Spec.ClusterSetIPCIDR
		if !own.invited() {
			spec.JoinTime = own.Spec.JoinTime
		}
		if asked := texts(r.Blocks); len(asked) > 0 && !containsAll(own.Spec.ClusterSetIPCIDR, asked) {
			j.Notes = append(j.Notes, fmt.Sprintf(
				"cluster %s keeps its ClusterSetIP blocks %s, and %s is ignored; isthmusctl member set %s --clusterset-ip-cidr changes them",
				id, strings.Join(own.Spec.ClusterSetIPCIDR, ", "), strings.Join(asked, ", "), id))
		}
	} else {
		blocks, err := chooseBlocks(all.config.Spec, r.Blocks, parsed(all.gone[id].ClusterSetIPCIDR), others)
		if err != nil {
			return Joined{}, err
		}
		spec.ClusterSetIPCIDR = texts(blocks)
	}
	j.Member = registration(r.Broker.Namespace, uid, given, spec)
	return j, nil
}

// registration returns a Member of the broker.
func registration(namespace, uid string, given []string, spec v1alpha1.MemberSpec) *v1alpha1.Member {
	m := &v1alpha1.Member{ObjectMeta: named(namespace, spec.ClusterID, spec.ClusterID), Spec: spec}
	slices.Sort(given)
	m.Annotations = map[string]string{annotationClusterUID: uid, annotationGiven: strings.Join(slices.Compact(given), ",")}
	return m
}

// addresses sets each kind of addresses of spec to the given, formerly given or discovered ones, and returns the flags that
// the administrator gave.
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
		{"supernets", "pod-supernet", r.Addresses.Supernets, before.PodSupernets, nil, &spec.PodSupernets},
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
	if onlyNodes && len(spec.PodSupernets) == 0 {
		j.Notes = append(j.Notes, "the pod CIDRs are those of the present nodes, because nothing tells those of the whole cluster (looked for: "+lookedFor+"); other members will ignore pods of nodes that are added later, so give the CIDR of all pods with --pod-cidr, or one in which later nodes get theirs with --pod-supernet")
	}
	return given
}

// enabled sets whether exports get ClusterSetIPs by default, and returns the flag if the administrator gave it.
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

// given reports whether the administrator gave a flag when c was registered.
func (c *claim) given(flag string) bool {
	return c != nil && slices.Contains(strings.Split(c.Given, ","), flag)
}

// checkFormerMember refuses an id of a former member if Services still have addresses that it allocated outside of spec's
// blocks: the other members would ignore those addresses.
func checkFormerMember(ctx context.Context, broker client.Client, namespace string, all *reservations, spec v1alpha1.MemberSpec) error {
	if own := all.own(spec.ClusterID); own != nil && own.registered {
		return nil
	}
	held, err := allocatedOutside(ctx, broker, namespace, spec)
	if err != nil || len(held) == 0 {
		return err
	}
	return fmt.Errorf("%w: a former member %s allocated ClusterSetIPs that are in use, to %s, and its block belongs to another member now; choose another --clusterid", ErrIDTaken, spec.ClusterID, admin.Some(held))
}

// allocatedOutside returns the Services, as namespace/name, that have a ClusterSetIP which the member of spec has allocated
// outside of the blocks of spec.
func allocatedOutside(ctx context.Context, broker client.Client, namespace string, spec v1alpha1.MemberSpec) ([]string, error) {
	aggregates := &mcsv1beta1.ServiceImportList{}
	if err := broker.List(ctx, aggregates, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list aggregates on the broker: %w", err)
	}
	blocks := parsed(spec.ClusterSetIPCIDR)
	var held []string
	for i := range aggregates.Items {
		a, _, err := mcs.ParseAggregate(&aggregates.Items[i])
		if err != nil {
			continue // members ignore it
		}
		for n, ip := range a.IPs {
			if string(a.OwnerOf(n)) == spec.ClusterID && !slices.ContainsFunc(blocks, func(b netip.Prefix) bool { return b.Contains(ip) }) {
				held = append(held, a.Service.String())
				break
			}
		}
	}
	slices.Sort(held)
	return held, nil
}

// configureMember writes the objects of the controller and the ClusterProperties into the member.
func (r Request) configureMember(ctx context.Context, member client.Client, token string, config *v1alpha1.ClusterSetConfig, j *Joined) error {
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
	if err := admin.InstallFences(ctx, member, r.Namespace); meta.IsNoMatchError(err) {
		j.Notes = append(j.Notes, "its labels of isthmus.dev are not protected either, so a tenant may pass an object off as one of Isthmus")
	} else if err != nil {
		return err
	}
	return resumeController(ctx, member, r.Namespace)
}

func containsAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}
