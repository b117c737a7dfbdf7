package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// ErrIDTaken says that another cluster has joined under the id.
var ErrIDTaken = errors.New("cluster id is taken")

// annotationClusterUID on a Member is the UID of the cluster's namespace kube-system, by which a cluster
// that joins again is told from another one under the same id.
const annotationClusterUID = "isthmus.io/cluster-uid"

// reservationPrefix and a cluster's id are the annotation of the ClusterSetConfig by which a join that is
// under way holds the id and its addresses, until the Member exists. All joins write this one object and
// the API server refuses a write that has not seen the one before, so no two get the same.
const reservationPrefix = "join.isthmus.io/"

// contention is how often, and after which pauses, a join tries again when others join at the same time.
var contention = wait.Backoff{Steps: 30, Duration: 20 * time.Millisecond, Factor: 1.3, Jitter: 0.5, Cap: time.Second}

// reservation is the value of that annotation.
type reservation struct {
	ClusterUID string              `json:"clusterUID"`
	Spec       v1alpha1.MemberSpec `json:"spec"`
}

// Request is one cluster's wish to join.
type Request struct {
	ClusterID clusterset.ClusterID
	// Broker says where the member's controller will find the broker. Its token is not used.
	Broker BrokerInfo
	// Namespace is where Isthmus is, or will be, installed in the member.
	Namespace string
	// Blocks the ClusterSetIPs shall come from, at most one a family; a family without one gets the
	// lowest free block, a /16 or a /64. A cluster that joins again keeps its blocks.
	Blocks []netip.Prefix
	// Addresses that are not nil replace what is found in the cluster.
	Addresses Addresses
}

// Joined is what became of a Request.
type Joined struct {
	Member   *v1alpha1.Member // as on the broker
	Rejoined bool             // the cluster had been registered before
	Notes    []string         // what the person who asked should know, one sentence each
}

// Join makes the cluster behind member a member of the ClusterSet of the broker: it registers id and
// addresses there, makes an account for the member, and puts the account's credentials, the definitions
// and a copy of the registration into the member. It refuses an id that another cluster has (ErrIDTaken)
// and addresses that overlap (ErrOverlap); nothing has been written then. Doing it again, also after it
// was cut off, keeps blocks and join time.
func Join(ctx context.Context, broker, member client.Client, r Request) (Joined, error) {
	var j Joined
	if err := r.ClusterID.Validate(); err != nil {
		return j, err
	}
	uid, err := clusterUID(ctx, member)
	if err != nil {
		return j, err
	}
	if err := r.checkMember(ctx, member); err != nil {
		return j, err
	}
	found, err := discover(ctx, member)
	if err != nil {
		return j, err
	}
	addresses := r.Addresses.orElse(found)
	if len(addresses.Pods) == 0 {
		return j, errors.New("no pod CIDR found on any node of the cluster; give --pod-cidr")
	}

	if err := r.register(ctx, broker, uid, addresses, &j); err != nil {
		return j, err
	}
	token, err := r.account(ctx, broker)
	if err != nil {
		return j, err
	}
	if err := r.equip(ctx, member, token, j.Member); err != nil {
		return j, err
	}
	return j, nil
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
	if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("look for an earlier membership: %w", err)
	}
	for _, m := range have.Items {
		if m.Name != string(r.ClusterID) {
			return fmt.Errorf("this cluster is member %s already; an id cannot change, so join as %s or let it leave first", m.Name, m.Name)
		}
	}
	return nil
}

// register reserves the id and the addresses on the broker, then writes the Member.
func (r Request) register(ctx context.Context, broker client.Client, uid string, addresses Addresses, j *Joined) error {
	var spec v1alpha1.MemberSpec
	var config *v1alpha1.ClusterSetConfig
	annotation := reservationPrefix + string(r.ClusterID)

	err := retry.RetryOnConflict(contention, func() error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// The config first: who has reserved before this read is in it, or has made a Member since.
		config = &v1alpha1.ClusterSetConfig{}
		key := client.ObjectKey{Namespace: r.Broker.Namespace, Name: v1alpha1.ClusterSetConfigName}
		if err := broker.Get(ctx, key, config); err != nil {
			return fmt.Errorf("read ClusterSetConfig %s on the broker: %w", key, err)
		}
		members := &v1alpha1.MemberList{}
		if err := broker.List(ctx, members, client.InNamespace(r.Broker.Namespace)); err != nil {
			return fmt.Errorf("list members on the broker: %w", err)
		}
		var err error
		if *j, err = r.decide(config, members.Items, uid, addresses); err != nil {
			return err
		}
		spec = j.Member.Spec
		text, err := json.Marshal(reservation{ClusterUID: uid, Spec: spec})
		if err != nil {
			return fmt.Errorf("encode reservation: %w", err)
		}
		metav1.SetMetaDataAnnotation(&config.ObjectMeta, annotation, string(text))
		return broker.Update(ctx, config, fieldOwner) // as it is: a conflict must be known as one
	})
	if err != nil {
		return fmt.Errorf("register cluster %s: %w", r.ClusterID, err)
	}
	if err := apply(ctx, broker, j.Member); err != nil {
		return err
	}
	// From here on the Member itself holds the addresses. Only our own annotation goes.
	release, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{annotation: nil}}})
	if err != nil {
		return fmt.Errorf("encode release: %w", err)
	}
	if err := broker.Patch(ctx, config, client.RawPatch(types.MergePatchType, release), fieldOwner); err != nil {
		return fmt.Errorf("release the reservation of cluster %s: %w", r.ClusterID, err)
	}
	return nil
}

// decide says what to register, given what stands on the broker. It is pure but for the clock.
func (r Request) decide(config *v1alpha1.ClusterSetConfig, members []v1alpha1.Member, uid string, addresses Addresses) (Joined, error) {
	others := map[string]v1alpha1.MemberSpec{} // by id
	var own *v1alpha1.MemberSpec
	claim := func(id, claimUID string, spec v1alpha1.MemberSpec) error {
		switch {
		case id != string(r.ClusterID):
			others[id] = spec
		case claimUID != uid:
			return fmt.Errorf("%w: another cluster joined as %s on %s; choose another --clusterid", ErrIDTaken, id, spec.JoinTime.UTC().Format(time.DateOnly))
		default:
			own = &spec
		}
		return nil
	}
	for key, text := range config.Annotations {
		id, ok := strings.CutPrefix(key, reservationPrefix)
		var held reservation
		if !ok || json.Unmarshal([]byte(text), &held) != nil {
			continue
		}
		if err := claim(id, held.ClusterUID, held.Spec); err != nil {
			return Joined{}, err
		}
	}
	rejoined := false
	for _, m := range members { // a Member outranks the reservation it came from
		if err := claim(m.Name, m.Annotations[annotationClusterUID], m.Spec); err != nil {
			return Joined{}, err
		}
		rejoined = rejoined || m.Name == string(r.ClusterID)
	}

	j := Joined{Rejoined: rejoined}
	spec := v1alpha1.MemberSpec{
		ClusterID:           string(r.ClusterID),
		ClusterSetID:        config.Spec.ClusterSetID,
		ClusterSetIPEnabled: config.Spec.ClusterSetIPEnabled,
		PodCIDRs:            texts(addresses.Pods),
		NodeCIDRs:           texts(addresses.Nodes),
		ServiceCIDRs:        texts(addresses.Services),
		JoinTime:            metav1.NewTime(time.Now().Truncate(time.Second)),
	}
	ranges := parsed(config.Spec.ClusterSetIPCIDRRange)
	if err := checkAddresses(spec, ranges, others, &j); err != nil {
		return Joined{}, err
	}
	if own != nil {
		spec.JoinTime, spec.ClusterSetIPCIDR = own.JoinTime, own.ClusterSetIPCIDR
		if asked := texts(r.Blocks); len(asked) > 0 && !containsAll(own.ClusterSetIPCIDR, asked) {
			j.Notes = append(j.Notes, fmt.Sprintf(
				"cluster %s keeps its ClusterSetIP blocks %s, and %s is ignored; to change them, unexport its Services, delete Member %s/%s on the broker, join again and restart Deployment isthmus-controller",
				r.ClusterID, strings.Join(own.ClusterSetIPCIDR, ", "), strings.Join(asked, ", "), r.Broker.Namespace, r.ClusterID))
		}
	} else {
		blocks, err := r.blocks(ranges, others)
		if err != nil {
			return Joined{}, err
		}
		spec.ClusterSetIPCIDR = texts(blocks)
	}
	j.Member = &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.Broker.Namespace, Name: string(r.ClusterID), Labels: ours(),
			Annotations: map[string]string{annotationClusterUID: uid},
		},
		Spec: spec,
	}
	j.Member.Labels[v1alpha1.LabelCluster] = string(r.ClusterID)
	return j, nil
}

// checkAddresses refuses addresses that mean two things somewhere in the ClusterSet. Two clusters may
// have the same service CIDR, as most have: Isthmus sends traffic to pods.
func checkAddresses(spec v1alpha1.MemberSpec, ranges []netip.Prefix, others map[string]v1alpha1.MemberSpec, j *Joined) error {
	kinds := []struct {
		name, flag string
		cidrs      []netip.Prefix
		routed     bool // other clusters send traffic there
	}{
		{"pod", "--pod-cidr", parsed(spec.PodCIDRs), true},
		{"node", "--node-cidr", parsed(spec.NodeCIDRs), true},
		{"service", "--service-cidr", parsed(spec.ServiceCIDRs), false},
	}
	var faults []error
	for _, kind := range kinds {
		if a, b, ok := overlap(kind.cidrs, ranges); ok {
			faults = append(faults, fmt.Errorf("%w: %s CIDR %s of this cluster lies in the range %s of ClusterSetIPs; deploy the broker with another --clusterset-ip-cidr-range",
				ErrOverlap, kind.name, a, b))
		}
		for _, id := range slices.Sorted(maps.Keys(others)) {
			theirs := others[id]
			rivals := slices.Concat(parsed(theirs.PodCIDRs), parsed(theirs.NodeCIDRs))
			services := parsed(theirs.ServiceCIDRs)
			if kind.routed {
				rivals = append(rivals, services...)
			} else if a, _, ok := overlap(kind.cidrs, services); ok {
				j.Notes = append(j.Notes, fmt.Sprintf("service CIDR %s is also that of member %s, which does no harm: traffic goes to pods", a, id))
			}
			if a, b, ok := overlap(kind.cidrs, rivals); ok {
				faults = append(faults, fmt.Errorf("%w: %s CIDR %s of this cluster and %s of member %s; the clusters of a ClusterSet need distinct ones, or give the right one by %s",
					ErrOverlap, kind.name, a, b, id, kind.flag))
				break // one member is enough to say what is wrong
			}
		}
	}
	return errors.Join(faults...)
}

// blocks chooses the member's ClusterSetIPs: those asked for, and the lowest free ones.
func (r Request) blocks(ranges []netip.Prefix, others map[string]v1alpha1.MemberSpec) ([]netip.Prefix, error) {
	if err := checkVIPs(r.Blocks); err != nil {
		return nil, fmt.Errorf("--clusterset-ip-cidr: %w", err)
	}
	var taken []netip.Prefix
	for _, other := range others {
		taken = append(taken, parsed(other.ClusterSetIPCIDR)...)
	}
	for _, asked := range r.Blocks {
		if !slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return within(asked, p) }) {
			return nil, fmt.Errorf("--clusterset-ip-cidr %s lies outside of the ClusterSet's ranges %v; choose a part of them", asked, ranges)
		}
		for _, id := range slices.Sorted(maps.Keys(others)) {
			if _, theirs, ok := overlap([]netip.Prefix{asked}, parsed(others[id].ClusterSetIPCIDR)); ok {
				return nil, fmt.Errorf("%w: --clusterset-ip-cidr %s and block %s of member %s; choose another one, or none to get a free one", ErrOverlap, asked, theirs, id)
			}
		}
	}
	var chosen []netip.Prefix
	for _, rng := range ranges {
		if i := slices.IndexFunc(r.Blocks, func(p netip.Prefix) bool { return within(p, rng) }); i >= 0 {
			chosen = append(chosen, r.Blocks[i])
			continue
		}
		block, err := firstFree(rng, blockBits(rng), taken)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, block)
	}
	return chosen, nil
}

// account makes the member's account on the broker and returns its token.
//
// The token is kept in a Secret: that works on every Kubernetes and stays valid while the member is
// away for long, where a requested token would run out and lock it out. Deleting the Secret revokes it.
func (r Request) account(ctx context.Context, broker client.Client) (string, error) {
	name := "member-" + string(r.ClusterID)
	named := func(name string) metav1.ObjectMeta {
		m := metav1.ObjectMeta{Namespace: r.Broker.Namespace, Name: name, Labels: ours()}
		m.Labels[v1alpha1.LabelCluster] = string(r.ClusterID)
		return m
	}
	secret := &corev1.Secret{ObjectMeta: named(name + "-token"), Type: corev1.SecretTypeServiceAccountToken}
	secret.Annotations = map[string]string{corev1.ServiceAccountNameKey: name}
	for _, obj := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: named(name)},
		binding(r.Broker.Namespace, name, memberRole, name),
		secret,
	} {
		if err := apply(ctx, broker, obj); err != nil {
			return "", fmt.Errorf("on the broker: %w", err)
		}
	}
	key := client.ObjectKeyFromObject(secret)
	err := await(ctx, fmt.Sprintf("the broker issued no token into Secret %s; is its controller manager running?", key), func() (bool, error) {
		if err := broker.Get(ctx, key, secret); err != nil {
			return false, fmt.Errorf("read Secret %s on the broker: %w", key, err)
		}
		return len(secret.Data[corev1.ServiceAccountTokenKey]) > 0, nil
	})
	return string(secret.Data[corev1.ServiceAccountTokenKey]), err
}

// equip puts into the member what its controller needs.
func (r Request) equip(ctx context.Context, member client.Client, token string, registered *v1alpha1.Member) error {
	kubeconfig, err := r.Broker.kubeconfig(token)
	if err != nil {
		return err
	}
	if err := applyCRDs(ctx, member); err != nil {
		return err
	}
	copied := &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.Namespace, Name: registered.Name,
			Labels: registered.Labels, Annotations: registered.Annotations,
		},
		Spec: registered.Spec,
	}
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.Namespace}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: v1alpha1.BrokerSecret, Labels: ours()},
			Data:       map[string][]byte{v1alpha1.BrokerSecretKubeconfig: kubeconfig},
		},
		copied,
	} {
		if err := apply(ctx, member, obj); err != nil {
			return fmt.Errorf("in the cluster that joins: %w", err)
		}
	}
	return nil
}

// overlap returns the first pair of prefixes, one of a and one of b, that have addresses in common.
func overlap(a, b []netip.Prefix) (inA, inB netip.Prefix, ok bool) {
	for _, p := range a {
		for _, q := range b {
			if p.Overlaps(q) {
				return p, q, true
			}
		}
	}
	return netip.Prefix{}, netip.Prefix{}, false
}

func containsAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}
