package policies

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

const (
	// annotationAdmits marks a NetworkPolicy that leaders made, together with our label. It is the name of the user's policy whose peers
	// it admits, which is in the same namespace.
	annotationAdmits = ours + "admits-peers-of"
	// admittedSuffix follows the name of the user's policy in that of the leaders'.
	admittedSuffix = ".services"
	// maxAdmitted is how many addresses of federated Services a policy admits in each direction. 5,000 take some 400 kB.
	maxAdmitted = 5000
)

// admittedFor returns the policy for whose peers leaders made o, and whether they did.
func admittedFor(o metav1.Object) (policy string, ok bool) {
	policy = o.GetAnnotations()[annotationAdmits]
	return policy, policy != "" && o.GetLabels()[v1alpha1.LabelManagedBy] == federationv1alpha1.ManagedBy
}

// admittedName returns the name of the leaders' policy for a user's one; "" if that has too long a name.
func admittedName(policy string) string {
	if name := policy + admittedSuffix; len(name) <= validation.DNS1123SubdomainMaxLength {
		return name
	}
	return ""
}

// namedService returns the Service that a peer of a core NetworkPolicy names, and whether it names one: by its label alone, and perhaps
// the namespace's name. Without a namespace it means the policy's own.
func namedService(namespace string, peer *networkingv1.NetworkPolicyPeer) (name clusterset.ServiceName, ok bool) {
	only := func(s *metav1.LabelSelector, label string) string {
		if s == nil || len(s.MatchExpressions) > 0 || len(s.MatchLabels) != 1 {
			return ""
		}
		return s.MatchLabels[label]
	}
	name.Name, name.Namespace = only(peer.PodSelector, federationv1alpha1.LabelPeerService), namespace
	if peer.NamespaceSelector != nil {
		name.Namespace = only(peer.NamespaceSelector, corev1.LabelMetadataName)
	}
	return name, name.Name != "" && name.Namespace != "" && peer.IPBlock == nil
}

// ServiceChanged has the policies of a member that name a federated Service as a peer reconciled again there, after the Service changed in
// that member: each of the others has the same Service, and reports its own change. Any goroutine may call it.
func (r *Reconciler) ServiceChanged(in clusterset.ClusterID, name clusterset.ServiceName) {
	enqueue := r.enqueue.Load()
	if enqueue == nil {
		return // every key is about to be reconciled
	}
	r.mu.Lock()
	var keys []reconcile.Key
	for at, named := range r.peers {
		if at.member == in && slices.Contains(named, name) {
			keys = append(keys, at.key)
		}
	}
	r.mu.Unlock()
	for _, key := range keys {
		(*enqueue)(key, in)
	}
}

// notePeers records the Services that a policy names in a member.
func (r *Reconciler) notePeers(at policyIn, named []clusterset.ServiceName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if delete(r.peers, at); len(named) > 0 {
		r.peers[at] = named
	}
}

// admitServices writes the policy that admits the endpoints of the federated Services that the policy of a key names, which is an origin or
// a copy. Without them there is none.
func (r *Reconciler) admitServices(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed) error {
	name := admittedName(key.Name)
	if key.Kind != networkPolicy || name == "" || !here.served {
		return nil
	}
	have := empty(key)
	if err := into.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: name}, have); client.IgnoreNotFound(err) != nil {
		return err
	}
	want, faults, err := r.admitted(ctx, key, into, here)
	if err != nil {
		return fmt.Errorf("admit the peers of %s: %w", describe(key), err)
	}
	_, made := admittedFor(have)
	if want == nil {
		r.faults.Delete(policyIn{into.ID(), key})
		if made {
			return into.Delete(ctx, have)
		}
		return nil
	}
	switch {
	case have.GetUID() == "":
		err = into.Create(ctx, want)
	case !made:
		faults = fmt.Sprintf("NetworkPolicy %s exists already, and leaders need the name to admit the Services that this policy names; rename one of them", name)
	case have.GetDeletionTimestamp() == nil && !(reflect.DeepEqual(body(have), body(want)) && reflect.DeepEqual(have.GetOwnerReferences(), want.GetOwnerReferences())):
		want.SetResourceVersion(have.GetResourceVersion())
		err = into.Replace(ctx, want)
	}
	if refuses(err) {
		faults = fmt.Sprintf("the API server refuses NetworkPolicy %s, by which leaders admit the Services that this policy names: %v", name, err)
	}
	if err == nil || refuses(err) {
		r.tellFaults(key, into, here.object, faults)
	}
	if terminating(err) {
		return nil
	}
	return err
}

// leftPeers watches what leaders wrote for the peers of core NetworkPolicies before that kind left the Federation. Nothing follows the
// endpoints any more, so other pods get the addresses that are admitted there.
func (r *Reconciler) leftPeers() reconcile.Watch {
	return reconcile.Watch{Keys: r.keysOfPolicy(corePolicies), Kind: objectcache.Kind{
		Source: objectcache.Source{
			Object:   object(corePolicies),
			Selector: labels.SelectorFromSet(labels.Set{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}),
			Keep:     func(o client.Object) bool { _, made := admittedFor(o); return made }, SkipIfForbidden: true,
		},
		Local: func(client.Object) bool { return true },
	}}
}

// dropPeers deletes what leaders wrote for the peers of the policy of a key, whose kind left the Federation.
func dropPeers(ctx context.Context, key reconcile.Key, into reconcile.Writer) error {
	have := empty(key)
	err := into.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: admittedName(key.Name)}, have)
	if _, made := admittedFor(have); err == nil && made {
		err = into.Delete(ctx, have)
	}
	if errors.Is(err, objectcache.ErrNotSynced) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// tellFaults records an event when the reason changes why peers of a policy are not admitted.
func (r *Reconciler) tellFaults(key reconcile.Key, into reconcile.Writer, policy *unstructured.Unstructured, faults string) {
	before, _ := r.faults.Swap(policyIn{into.ID(), key}, faults)
	if faults == "" {
		r.faults.Delete(policyIn{into.ID(), key})
	} else if before != faults {
		into.Event(policy, corev1.EventTypeWarning, "PeersNotAdmitted", faults)
	}
}

// admits reports whether peers of a policy in a member are admitted: it is a copy, or an origin that the Federation replicates.
func (h *observed) admits() bool {
	if h.object == nil || h.object.GetDeletionTimestamp() != nil {
		return false
	}
	_, isCopy := copyOf(h.object)
	return isCopy || h.asks()
}

// admitted returns the policy that leaders write beside a policy in a member, and why it does not admit all. It is nil if there is to be
// none.
func (r *Reconciler) admitted(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed) (want *unstructured.Unstructured, faults string, err error) {
	if !here.admits() {
		r.notePeers(policyIn{into.ID(), key}, nil)
		return nil, "", nil
	}
	var users networkingv1.NetworkPolicy
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(here.object.Object, &users); err != nil {
		return nil, "", err
	}
	peers := servicePeers{namespace: key.Namespace, into: into.Live(), read: map[clusterset.ServiceName]*peerService{}}
	spec, err := peers.admit(ctx, &users.Spec)
	if err != nil {
		return nil, "", err
	}
	r.notePeers(policyIn{into.ID(), key}, slices.Collect(maps.Keys(peers.read)))
	if len(spec.PolicyTypes) == 0 {
		return nil, "", nil
	}
	if peers.tooMany {
		faults = fmt.Sprintf("the Services that it names have more than %d addresses; the others are not admitted", maxAdmitted)
	}
	made := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{
		Namespace: key.Namespace, Name: admittedName(key.Name),
		Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}, Annotations: map[string]string{annotationAdmits: key.Name},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Name: key.Name, UID: here.object.GetUID()}},
	}, Spec: *spec}
	want = empty(key)
	gvk := want.GroupVersionKind()
	want.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(made)
	want.SetGroupVersionKind(gvk)
	return want, faults, err
}

// servicePeers reads the federated Services that a policy names in one member.
type servicePeers struct {
	namespace string // of the policy
	into      client.Reader
	read      map[clusterset.ServiceName]*peerService
	tooMany   bool // addresses were left out
}

// peerService is a federated Service and its slices, in one member.
type peerService struct {
	ports  []corev1.ServicePort
	slices []discoveryv1.EndpointSlice
}

// admit returns the rules of a policy that name federated Services, with their addresses. A policy without such rules gets no
// PolicyTypes.
func (s *servicePeers) admit(ctx context.Context, users *networkingv1.NetworkPolicySpec) (*networkingv1.NetworkPolicySpec, error) {
	spec := &networkingv1.NetworkPolicySpec{PodSelector: users.PodSelector}
	left := maxAdmitted
	for _, rule := range inForce(users, networkingv1.PolicyTypeIngress, users.Ingress) {
		named, err := s.named(ctx, rule.From)
		if err != nil {
			return nil, err
		}
		var all []discoveryv1.EndpointSlice
		for _, service := range named {
			all = append(all, service.slices...)
		}
		if from := s.blocks(all, &left); len(from) > 0 {
			spec.Ingress = append(spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: from, Ports: rule.Ports})
		}
	}
	left = maxAdmitted
	for _, rule := range inForce(users, networkingv1.PolicyTypeEgress, users.Egress) {
		named, err := s.named(ctx, rule.To)
		if err != nil {
			return nil, err
		}
		for _, service := range named {
			spec.Egress = append(spec.Egress, s.servers(service, rule.Ports, &left)...)
		}
	}
	if len(spec.Ingress) > 0 {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeIngress)
	}
	if len(spec.Egress) > 0 {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
	}
	return spec, nil
}

// inForce returns the rules of a direction, none if the policy has not its type: they are ignored then, and one with the type would isolate
// pods that the policy does not.
func inForce[R any](policy *networkingv1.NetworkPolicySpec, direction networkingv1.PolicyType, rules []R) []R {
	if !slices.Contains(policy.PolicyTypes, direction) {
		return nil
	}
	return rules
}

// named returns the federated Services among the peers of a rule. One that does not exist has nothing to admit.
func (s *servicePeers) named(ctx context.Context, peers []networkingv1.NetworkPolicyPeer) (all []*peerService, err error) {
	for i := range peers {
		name, ok := namedService(s.namespace, &peers[i])
		if !ok {
			continue
		}
		if s.read[name] == nil {
			if s.read[name], err = s.get(ctx, name); err != nil {
				return nil, err
			}
		}
		all = append(all, s.read[name])
	}
	return all, nil
}

func (s *servicePeers) get(ctx context.Context, name clusterset.ServiceName) (*peerService, error) {
	var svc corev1.Service
	if err := s.into.Get(ctx, client.ObjectKey(name), &svc); err != nil || !isFederatedService(&svc) || svc.Labels[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy {
		return &peerService{}, client.IgnoreNotFound(err)
	}
	var list discoveryv1.EndpointSliceList
	err := s.into.List(ctx, &list, client.InNamespace(name.Namespace),
		client.MatchingLabels{discoveryv1.LabelServiceName: name.Name, discoveryv1.LabelManagedBy: federationv1alpha1.ManagedBy})
	slices.SortFunc(list.Items, func(a, b discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) })
	return &peerService{ports: svc.Spec.Ports, slices: list.Items}, err
}

// blocks returns the addresses of slices as peers, sorted, as many as are left.
func (s *servicePeers) blocks(all []discoveryv1.EndpointSlice, left *int) (peers []networkingv1.NetworkPolicyPeer) {
	found := map[netip.Addr]bool{}
	for _, es := range all {
		for _, e := range es.Endpoints {
			for _, text := range e.Addresses {
				if addr, err := netip.ParseAddr(text); err == nil { // the others are names
					found[addr] = true
				}
			}
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(found), netip.Addr.Compare) {
		if *left--; *left < 0 {
			s.tooMany = true
			break
		}
		peers = append(peers, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: netip.PrefixFrom(addr, addr.BitLen()).String()}})
	}
	return peers
}

// servers returns the rules that admit connections to a Service: a policy sees the address and port of the endpoint, not the Service's.
// allowed are the ports of the Service that the user's rule allows, all without any. Slices with the same ports share a rule.
func (s *servicePeers) servers(service *peerService, allowed []networkingv1.NetworkPolicyPort, left *int) (rules []networkingv1.NetworkPolicyEgressRule) {
	byPorts := map[string][]discoveryv1.EndpointSlice{}
	ports := map[string][]networkingv1.NetworkPolicyPort{}
	for _, es := range service.slices {
		var serves []networkingv1.NetworkPolicyPort
		for _, p := range es.Ports {
			protocol := *cmp.Or(p.Protocol, new(corev1.ProtocolTCP))
			if p.Port == nil || !slices.ContainsFunc(service.ports, func(sp corev1.ServicePort) bool {
				return sp.Name == *cmp.Or(p.Name, new("")) && cmp.Or(sp.Protocol, corev1.ProtocolTCP) == protocol && allows(allowed, &sp)
			}) {
				continue
			}
			serves = append(serves, networkingv1.NetworkPolicyPort{Protocol: &protocol, Port: new(intstr.FromInt32(*p.Port))})
		}
		text := digest(serves)
		byPorts[text], ports[text] = append(byPorts[text], es), serves
	}
	for _, text := range slices.Sorted(maps.Keys(byPorts)) {
		if to := s.blocks(byPorts[text], left); len(to) > 0 && len(ports[text]) > 0 {
			rules = append(rules, networkingv1.NetworkPolicyEgressRule{To: to, Ports: ports[text]})
		}
	}
	return rules
}

// allows reports whether a rule allows a port of a Service, by its number or name. A rule without ports allows all.
func allows(rule []networkingv1.NetworkPolicyPort, p *corev1.ServicePort) bool {
	return len(rule) == 0 || slices.ContainsFunc(rule, func(r networkingv1.NetworkPolicyPort) bool {
		if *cmp.Or(r.Protocol, new(corev1.ProtocolTCP)) != cmp.Or(p.Protocol, corev1.ProtocolTCP) {
			return false
		}
		if r.Port == nil {
			return true
		}
		if r.Port.Type == intstr.String {
			return r.Port.StrVal == p.Name
		}
		last := *cmp.Or(r.EndPort, &r.Port.IntVal)
		return r.Port.IntVal <= p.Port && p.Port <= last
	})
}
