package membership

import (
	"cmp"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Errors about objects that the broker does not have.
var (
	// ErrNoBroker means that a namespace is not a broker, or not the expected one.
	ErrNoBroker = errors.New("this is not the broker")
	// ErrNoMember means that no member has an id.
	ErrNoMember = errors.New("no such member")
)

// errNoCredentials means that the broker's API server dropped the name of the credential.
var errNoCredentials = fmt.Errorf("%w: the broker's CustomResourceDefinition clustersetconfigs.isthmus.dev lacks spec.members[].credential; run isthmusctl deploy-broker, which updates it and keeps all settings", ErrOlderDefinitions)

// reservationPrefix plus a cluster's id is the annotation of the ClusterSetConfig that reserves the id and its addresses
// until the Member exists. For example, two clusters join at the same time and both choose block 243.1.0.0/16: they write
// the same object, so the API server refuses the second write as a conflict, and that join chooses the next block.
const reservationPrefix = "join.isthmus.dev/"

// contention is the backoff after conflicts with concurrent writers.
var contention = wait.Backoff{Steps: 30, Duration: 20 * time.Millisecond, Factor: 1.3, Jitter: 0.5, Cap: time.Second}

// reservation is the value of the annotation.
type reservation struct {
	ClusterUID string              `json:"clusterUID"`
	Given      string              `json:"given,omitempty"`
	Spec       v1alpha1.MemberSpec `json:"spec"`
}

// reservations holds the ids and addresses of members and of joining clusters on the broker.
type reservations struct {
	config *v1alpha1.ClusterSetConfig
	claims []claim
	gone   map[string]v1alpha1.MemberSpec // tombstones, by id
}

// claim is one cluster's id and addresses. That of an invitation has no ClusterUID.
type claim struct {
	id         string
	registered bool // it has a Member, and not only a reservation
	bridged    bool // it runs another system, and a bridge acts for it
	reservation
}

// invited reports whether the cluster has an invitation and has not begun to join.
func (c *claim) invited() bool { return !c.registered && c.ClusterUID == "" }

// readConfig reads the ClusterSetConfig. A namespace without one is not a broker.
func readConfig(ctx context.Context, broker client.Client, namespace string) (*v1alpha1.ClusterSetConfig, error) {
	config := &v1alpha1.ClusterSetConfig{}
	key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.ClusterSetConfigName}
	err := broker.Get(ctx, key, config)
	if admin.IsAbsent(err) {
		return nil, fmt.Errorf("%w: it has no ClusterSetConfig %s; use the kubeconfig of the broker's cluster, and the namespace that isthmusctl deploy-broker created there", ErrNoBroker, key)
	}
	if err != nil {
		return nil, fmt.Errorf("read ClusterSetConfig %s on the broker: %w", key, err)
	}
	return config, nil
}

// readReservations reads the config before the Members. In the other order it could miss a cluster whose reservation becomes a
// Member between the two reads.
func readReservations(ctx context.Context, broker client.Client, namespace string) (*reservations, error) {
	config, err := readConfig(ctx, broker, namespace)
	if err != nil {
		return nil, err
	}
	members := &v1alpha1.MemberList{}
	if err := broker.List(ctx, members, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list members on the broker: %w", err)
	}
	all := &reservations{config: config, gone: map[string]v1alpha1.MemberSpec{}}
	for key, text := range config.Annotations {
		id, ok := strings.CutPrefix(key, reservationPrefix)
		c := claim{id: id}
		if ok && json.Unmarshal([]byte(text), &c.reservation) == nil {
			all.claims = append(all.claims, c)
		}
	}
	for _, m := range members.Items {
		if m.Spec.LeftAt != nil {
			all.gone[m.Name] = m.Spec
			continue
		}
		all.claims = append(all.claims, claim{m.Name, true, m.Annotations[v1alpha1.AnnotationBridge] != "", reservation{m.Annotations[annotationClusterUID], m.Annotations[annotationGiven], m.Spec}})
	}
	// An invitation has only blocks.
	for _, b := range config.Spec.Members {
		if all.own(b.ClusterID) == nil {
			all.claims = append(all.claims, claim{id: b.ClusterID, reservation: reservation{Spec: v1alpha1.MemberSpec{ClusterID: b.ClusterID, ClusterSetIPCIDR: b.ClusterSetIPCIDR}}})
		}
	}
	// A Member takes precedence over its reservation, and so comes later.
	slices.SortStableFunc(all.claims, func(a, b claim) int { return strings.Compare(a.id, b.id) })
	return all, nil
}

// own returns the claim of id, or nil.
func (all *reservations) own(id string) *claim {
	var held *claim
	for i := range all.claims {
		if all.claims[i].id == id {
			held = &all.claims[i]
		}
	}
	return held
}

// others returns the claims of all clusters but id, sorted by id.
func (all *reservations) others(id string) []claim {
	return slices.DeleteFunc(slices.Clone(all.claims), func(c claim) bool { return c.id == id })
}

// register writes the Member that decide derives from the reservations. It may call decide several times, and writes the
// last result; if decide fails, it writes nothing. Between the reservation and the Member it calls equip, if that is not nil, with
// the name of the Secret for the member's tokens. An interrupted register leaves a reservation until it is repeated.
func register(ctx context.Context, broker client.Client, namespace, id string, decide func(*reservations) (*v1alpha1.Member, error),
	equip func(credential string) error,
) (*v1alpha1.Member, error) {
	annotation := reservationPrefix + id
	var m *v1alpha1.Member
	var config *v1alpha1.ClusterSetConfig
	err := retry.RetryOnConflict(contention, func() error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		all, err := readReservations(ctx, broker, namespace)
		if err != nil {
			return err
		}
		if m, err = decide(all); err != nil {
			return err
		}
		text, err := json.Marshal(reservation{m.Annotations[annotationClusterUID], m.Annotations[annotationGiven], m.Spec})
		if err != nil {
			return fmt.Errorf("encode reservation: %w", err)
		}
		config = all.config
		metav1.SetMetaDataAnnotation(&config.ObjectMeta, annotation, string(text))
		config.Spec.Members = withBlocks(config.Spec.Members, id, m.Spec.ClusterSetIPCIDR)
		if equip != nil {
			config.Spec.Members = withAnyCredential(config.Spec.Members, id)
		}
		return broker.Update(ctx, config, admin.FieldOwner) // unwrapped, because RetryOnConflict checks for a conflict
	})
	if err != nil {
		return nil, fmt.Errorf("register cluster %s: %w", id, err)
	}
	if !slices.ContainsFunc(config.Spec.Members, func(b v1alpha1.MemberBlocks) bool { return b.ClusterID == id }) {
		return nil, fmt.Errorf("%w: the broker's CustomResourceDefinition clustersetconfigs.isthmus.dev lacks spec.members; run isthmusctl deploy-broker, which updates it and keeps all settings", ErrOlderDefinitions)
	}
	if equip != nil {
		if config.Spec.Credential(id) == "" {
			return nil, errNoCredentials
		}
		if err := equip(config.Spec.Credential(id)); err != nil {
			return nil, err
		}
	}
	if err := admin.Apply(ctx, broker, m); err != nil {
		return nil, err
	}
	if err := checkSupernets(ctx, broker, m); err != nil {
		return nil, err
	}
	// From here on the Member itself reserves the addresses.
	if err := release(ctx, broker, config, id); err != nil {
		return nil, err
	}
	return m, publishBlocks(ctx, broker, namespace)
}

// checkSupernets returns an error if the broker dropped the supernets of m, because its definitions are older.
func checkSupernets(ctx context.Context, broker client.Client, m *v1alpha1.Member) error {
	if len(m.Spec.PodSupernets) == 0 {
		return nil
	}
	stored, err := readMember(ctx, broker, m.Namespace, m.Name)
	if err == nil && len(stored.Spec.PodSupernets) == 0 {
		err = fmt.Errorf("%w: the broker's CustomResourceDefinition members.isthmus.dev lacks spec.podSupernets; run isthmusctl deploy-broker, which updates it and keeps all settings", ErrOlderDefinitions)
	}
	return err
}

// mayBecome reports whether the cluster with a UID may have the id of c: it has it, or nobody has it yet.
func (c *claim) mayBecome(uid string) bool {
	return c.ClusterUID == uid || c.invited() || c.bridged && c.ClusterUID == ""
}

// release removes the reservation of id from config.
func release(ctx context.Context, broker client.Client, config *v1alpha1.ClusterSetConfig, id string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{reservationPrefix + id: nil}}})
	if err != nil {
		return fmt.Errorf("encode release: %w", err)
	}
	if err := broker.Patch(ctx, config, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner); err != nil {
		return fmt.Errorf("release the reservation of cluster %s: %w", id, err)
	}
	return nil
}

// withBlocks returns list with the blocks of id, sorted by id. It keeps the credential of id.
func withBlocks(list []v1alpha1.MemberBlocks, id string, blocks []string) []v1alpha1.MemberBlocks {
	credential := v1alpha1.ClusterSetConfigSpec{Members: list}.Credential(id)
	list = append(withoutMember(list, id), v1alpha1.MemberBlocks{ClusterID: id, ClusterSetIPCIDR: blocks, Credential: credential})
	slices.SortFunc(list, func(a, b v1alpha1.MemberBlocks) int { return strings.Compare(a.ClusterID, b.ClusterID) })
	return list
}

// withCredential returns list with the credential of id, if it has id.
func withCredential(list []v1alpha1.MemberBlocks, id, credential string) []v1alpha1.MemberBlocks {
	list = slices.Clone(list)
	for i := range list {
		if list[i].ClusterID == id {
			list[i].Credential = credential
		}
	}
	return list
}

// withAnyCredential returns list with a new credential of id, if it has none.
func withAnyCredential(list []v1alpha1.MemberBlocks, id string) []v1alpha1.MemberBlocks {
	if (v1alpha1.ClusterSetConfigSpec{Members: list}).Credential(id) != "" {
		return list
	}
	return withCredential(list, id, newCredential(id))
}

// withoutMember returns list without id.
func withoutMember(list []v1alpha1.MemberBlocks, id string) []v1alpha1.MemberBlocks {
	return slices.DeleteFunc(slices.Clone(list), func(b v1alpha1.MemberBlocks) bool { return b.ClusterID == id })
}

// unlist removes id and its reservation from the ClusterSetConfig, so that the admission policies refuse its writes. It
// succeeds if id is not listed.
func unlist(ctx context.Context, broker client.Client, namespace, id string) error {
	err := retry.RetryOnConflict(contention, func() error {
		config, err := readConfig(ctx, broker, namespace)
		if err != nil {
			return err
		}
		_, reserved := config.Annotations[reservationPrefix+id]
		left := withoutMember(config.Spec.Members, id)
		if !reserved && len(left) == len(config.Spec.Members) {
			return nil
		}
		delete(config.Annotations, reservationPrefix+id)
		config.Spec.Members = left
		return broker.Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return fmt.Errorf("remove cluster %s from the ClusterSetConfig: %w", id, err)
	}
	return publishBlocks(ctx, broker, namespace)
}

// publishBlocks copies the ClusterSetConfig into ConfigMap isthmus-clusterset-ip. It reads the ConfigMap first, so that of
// two concurrent writers the last one has read the latest config.
func publishBlocks(ctx context.Context, broker client.Client, namespace string) error {
	err := retry.RetryOnConflict(contention, func() error {
		have := &corev1.ConfigMap{}
		key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.ClusterSetIPConfigMap}
		err := broker.Get(ctx, key, have)
		absent := apierrors.IsNotFound(err)
		if err != nil && !absent {
			return err
		}
		config, err := readConfig(ctx, broker, namespace)
		if err != nil {
			return err
		}
		want, err := blocksText(config.Spec)
		if err != nil {
			return err
		}
		if absent {
			err := broker.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: key.Name, Labels: admin.Ours()}, Data: want}, admin.FieldOwner)
			if apierrors.IsAlreadyExists(err) { // another writer was faster, and may have read an older config
				return apierrors.NewConflict(corev1.Resource("configmaps"), key.Name, err)
			}
			return err
		}
		if maps.Equal(have.Data, want) {
			return nil
		}
		have.Data = want
		return broker.Update(ctx, have, admin.FieldOwner)
	})
	if err != nil {
		return fmt.Errorf("write ConfigMap %s/%s on the broker: %w", namespace, v1alpha1.ClusterSetIPConfigMap, err)
	}
	return nil
}

// blocksText returns the content of that ConfigMap, with Submariner's keys and with lists as JSON.
func blocksText(spec v1alpha1.ClusterSetConfigSpec) (map[string]string, error) {
	type clusterInfo struct {
		ClusterID string   `json:"cluster_id"`
		CIDRs     []string `json:"global_cidr"`
	}
	infos := []clusterInfo{}
	for _, m := range spec.Members {
		infos = append(infos, clusterInfo{m.ClusterID, m.ClusterSetIPCIDR})
	}
	members, err1 := json.Marshal(infos)
	ranges, err2 := json.Marshal(spec.ClusterSetIPCIDRRange)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("encode blocks: %w", err)
	}
	return map[string]string{
		"clustersetIPEnabled":     fmt.Sprint(spec.ClusterSetIPEnabled),
		"clustersetIPCIDRRange":   string(ranges),
		"clustersetIPClusterSize": fmt.Sprint(cmp.Or(spec.ClusterSetIPClusterSize, defaultClusterSize)),
		"clusterinfo":             string(members),
	}, nil
}

// checkAddresses refuses addresses of a registration that are ambiguous in the ClusterSet. Two clusters may have the same
// service CIDR, as most have, if Isthmus sends traffic to pods; notes mention that.
func checkAddresses(spec v1alpha1.MemberSpec, ranges []netip.Prefix, others []claim) (notes []string, err error) {
	kinds := []struct {
		name, flag string
		cidrs      []netip.Prefix
		routed     bool // other clusters send traffic there
	}{
		{"pod", "--pod-cidr", parsed(spec.PodCIDRs), true},
		{"node", "--node-cidr", parsed(spec.NodeCIDRs), true},
		{"extra", "--extra-cidr", parsed(spec.ExtraCIDRs), true},
		{"supernet", "--pod-supernet", parsed(spec.PodSupernets), true},
		{"service", "--service-cidr", parsed(spec.ServiceCIDRs), serviceVIPs(spec.Settings)},
	}
	var faults []error
	for _, kind := range kinds {
		if a, b, ok := overlap(kind.cidrs, ranges); ok {
			faults = append(faults, fmt.Errorf("%w: %s CIDR %s of this cluster lies in the range %s of ClusterSetIPs; deploy the broker with another --clusterset-ip-cidr-range",
				ErrOverlap, kind.name, a, b))
		}
		for _, other := range others {
			theirs := other.Spec
			rivals := slices.Concat(parsed(theirs.PodCIDRs), parsed(theirs.NodeCIDRs), parsed(theirs.ExtraCIDRs), parsed(theirs.PodSupernets))
			services := parsed(theirs.ServiceCIDRs)
			if kind.routed || serviceVIPs(theirs.Settings) {
				rivals = append(rivals, services...)
			} else if a, _, ok := overlap(kind.cidrs, services); ok {
				notes = append(notes, fmt.Sprintf("member %[2]s has the same service CIDR %[1]s, which is harmless while traffic goes to pods: for Services with a ClusterSetIP, and for headless ones", a, other.id))
			}
			if a, b, ok := overlap(kind.cidrs, rivals); ok {
				faults = append(faults, fmt.Errorf("%w: %s CIDR %s of this cluster and %s of member %s; the clusters of a ClusterSet need distinct CIDRs, or give the right one with %s",
					ErrOverlap, kind.name, a, b, other.id, kind.flag))
				break // one member suffices to explain the fault
			}
		}
	}
	return notes, errors.Join(faults...)
}

// serviceVIPs reports whether a member exports the addresses of its Services instead of its pods.
func serviceVIPs(s v1alpha1.Settings) bool {
	return s.Endpoints == v1alpha1.EndpointsServiceVIP || s.Endpoints == "" && s.Profile == v1alpha1.ProfileLighthouse
}

// chooseBlocks returns a member's ClusterSetIP blocks: the requested ones, and for other families the preferred ones if they
// are free, or else the lowest free ones.
func chooseBlocks(spec v1alpha1.ClusterSetConfigSpec, asked, preferred []netip.Prefix, others []claim) ([]netip.Prefix, error) {
	ranges := parsed(spec.ClusterSetIPCIDRRange)
	if err := checkBlocks(asked, ranges, others); err != nil {
		return nil, err
	}
	var taken []netip.Prefix
	for _, other := range others {
		taken = append(taken, parsed(other.Spec.ClusterSetIPCIDR)...)
	}
	var chosen []netip.Prefix
	for _, rng := range ranges {
		inside := func(p netip.Prefix) bool { return clusterset.Within(p, rng) }
		if i := slices.IndexFunc(asked, inside); i >= 0 {
			chosen = append(chosen, asked[i])
			continue
		}
		if i := slices.IndexFunc(preferred, inside); i >= 0 && !slices.ContainsFunc(taken, preferred[i].Overlaps) {
			chosen = append(chosen, preferred[i])
			continue
		}
		block, err := firstFree(rng, blockBits(rng, spec.ClusterSetIPClusterSize), taken)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, block)
	}
	return chosen, nil
}

// checkBlocks refuses requested blocks that are not valid or belong to another member.
func checkBlocks(asked, ranges []netip.Prefix, others []claim) error {
	if err := checkVIPs(asked); err != nil {
		return fmt.Errorf("--clusterset-ip-cidr: %w", err)
	}
	for _, a := range asked {
		if !slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return clusterset.Within(a, p) }) {
			return fmt.Errorf("--clusterset-ip-cidr %s lies outside of the ClusterSet's ranges %v; choose a part of them", a, ranges)
		}
		for _, other := range others {
			if _, theirs, ok := overlap([]netip.Prefix{a}, parsed(other.Spec.ClusterSetIPCIDR)); ok {
				return fmt.Errorf("%w: --clusterset-ip-cidr %s and block %s of member %s; choose another block, or omit the flag to get a free one", ErrOverlap, a, theirs, other.id)
			}
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
