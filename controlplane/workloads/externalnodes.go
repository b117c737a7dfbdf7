package workloads

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// externalNode is the kind of Antrea for a machine outside of the cluster. Its policies select machines by the labels of these
// objects, and the antrea-agent of a machine finds its own by the name: https://antrea.io/docs/main/docs/external-node/
var externalNode = schema.GroupVersionKind{Group: "crd.antrea.io", Version: "v1alpha1", Kind: "ExternalNode"}

// errAntreaMissing is returned if the settings ask for ExternalNodes and the cluster does not have the kind.
var errAntreaMissing = errors.New("externalNodes is set, and this cluster has no ExternalNode of crd.antrea.io/v1alpha1; install Antrea, or remove the setting")

func newExternalNode() *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(externalNode)
	return o
}

// externalNodes writes an ExternalNode for each server and ExternalWorkload with an address, in the namespace of its Service, and
// deletes those of machines that are gone. Those of unread sources stay, and so do those of users.
func (c *Controller) externalNodes(ctx context.Context, machines []machine, unread map[source]bool) (problems []problem, err error) {
	if !c.cfg.Settings.ExternalNodes {
		return nil, nil
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(externalNode.GroupVersion().WithKind("ExternalNodeList"))
	if err := c.cache.List(ctx, list); errors.Is(err, objectcache.ErrKindMissing) {
		return nil, errAntreaMissing
	} else if err != nil {
		return nil, err
	}
	have := map[client.ObjectKey]*unstructured.Unstructured{}
	for i := range list.Items {
		have[client.ObjectKeyFromObject(&list.Items[i])] = &list.Items[i]
	}
	wanted, problems := wantedNodes(machines)
	var errs []error
	for key, of := range wanted {
		taken, err := c.applyNode(ctx, of, have[key])
		if taken {
			problems = append(problems, problem{of.machine, fmt.Sprintf("externalnode %s is not ours and stays unchanged; rename one of them", key)})
		}
		errs = append(errs, withoutConflict(err))
	}
	for key, o := range have {
		if _, ok := wanted[key]; ok || unread[sourceOf(o)] {
			continue
		}
		errs = append(errs, withoutConflict(describeNode("delete", key, c.delete(ctx, o))))
	}
	return problems, errors.Join(errs...)
}

// node is a wanted ExternalNode and its machine.
type node struct {
	*unstructured.Unstructured

	machine machine
}

// wantedNodes returns the ExternalNodes of machines. It has the name of its machine, which is the machine's host name with most
// clouds, or else its ID. Of two machines of one name the older one has it.
func wantedNodes(machines []machine) (wanted map[client.ObjectKey]node, problems []problem) {
	wanted = map[client.ObjectKey]node{}
	for _, m := range machines {
		if m.source.loadBalancers || len(m.addrs) == 0 {
			continue
		}
		name := strings.ToLower(m.name)
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			name = m.source.labelOf(m.id)
		}
		key := client.ObjectKey{Namespace: m.service.Namespace, Name: name}
		n := node{newExternalNode(), m}
		if other, ok := wanted[key]; ok {
			younger := m
			if m.compare(other.machine) < 0 {
				younger = other.machine
			} else {
				n = other
			}
			problems = append(problems, problem{younger, fmt.Sprintf("externalnode %s is that of %s; give the machines different names", key, n.machine)})
		}
		n.fill(key)
		wanted[key] = n
	}
	return wanted, problems
}

// fill sets the contents of an ExternalNode.
func (n node) fill(key client.ObjectKey) {
	n.SetNamespace(key.Namespace)
	n.SetName(key.Name)
	labels := maps.Clone(n.machine.labels)
	labels[isthmus.LabelManagedBy] = v1alpha1.ManagedByMachines
	n.machine.source.mark(labels)
	n.SetLabels(labels)
	var ips []any
	for _, a := range n.machine.addrs {
		ips = append(ips, a.String())
	}
	n.Object["spec"] = map[string]any{"interfaces": []any{map[string]any{"ips": ips}}}
}

// applyNode creates or updates an ExternalNode. taken reports that one of a user has the name.
func (c *Controller) applyNode(ctx context.Context, want node, have *unstructured.Unstructured) (taken bool, err error) {
	key := client.ObjectKeyFromObject(want)
	if have == nil {
		err = c.client.Create(ctx, want.Unstructured)
		if apierrors.IsNotFound(err) {
			return false, nil // there is no such namespace, as the machine's Service reports
		}
		if !apierrors.IsAlreadyExists(err) {
			return false, describeNode("create", key, err)
		}
		have = newExternalNode() // created a moment ago and not in the cache yet, or a user's
		if err := c.client.Get(ctx, key, have); err != nil {
			return false, describeNode("read", key, err)
		}
		if have.GetLabels()[isthmus.LabelManagedBy] != v1alpha1.ManagedByMachines {
			return true, nil
		}
	}
	o := have.DeepCopy()
	o.SetLabels(want.GetLabels())
	spec, _ := o.Object["spec"].(map[string]any)
	if spec == nil {
		spec = map[string]any{}
		o.Object["spec"] = spec
	}
	spec["interfaces"] = want.Object["spec"].(map[string]any)["interfaces"]
	if equality.Semantic.DeepEqual(o, have) {
		return false, nil
	}
	return false, describeNode("change", key, c.client.Update(ctx, o))
}

// describeNode adds the object to an error.
func describeNode(verb string, key client.ObjectKey, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s externalnode %s: %w", verb, key, err)
}
