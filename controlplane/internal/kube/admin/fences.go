package admin

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Labels and annotations of Helm and of the chart.
const (
	labelInstance     = "app.kubernetes.io/instance" // on every object of the chart and of the manifests
	releaseName       = "meta.helm.sh/release-name"
	releaseNamespace  = "meta.helm.sh/release-namespace"
	managedByHelm     = "Helm"
	release           = "isthmus"
	ownerHelm         = client.FieldOwner("helm")
	needsNewerVersion = "the cluster has no ValidatingAdmissionPolicies; it needs Kubernetes 1.30 or newer"
)

// InstallFences writes the admission policies of package fences into a member with Isthmus in namespace, unless the chart or
// the manifests have written them. A release named isthmus that is installed later takes them over: they have its annotations
// and its field manager, without which Helm would refuse to install over them.
func InstallFences(ctx context.Context, c client.Client, namespace string) error {
	policies, err := fences.Policies(namespace)
	if err != nil {
		return err
	}
	for _, obj := range policies {
		installed, err := ByChart(ctx, c, obj)
		if meta.IsNoMatchError(err) {
			return fmt.Errorf("%s: %w", needsNewerVersion, err)
		}
		if err != nil {
			return err
		}
		if installed {
			continue
		}
		obj.SetLabels(map[string]string{v1alpha1.LabelManagedBy: managedByHelm})
		obj.SetAnnotations(map[string]string{releaseName: release, releaseNamespace: namespace})
		if err := applyAs(ctx, c, obj, ownerHelm); err != nil {
			return err
		}
	}
	return nil
}

// RemoveFences deletes the policies that InstallFences wrote, unless the cluster has an object of the kinds of others, for which
// they are needed still. Those of the chart go when it is uninstalled.
func RemoveFences(ctx context.Context, c client.Client, namespace string, others ...client.ObjectList) error {
	for _, list := range others {
		if err := c.List(ctx, list, client.InNamespace(namespace)); err != nil && !IsAbsent(err) {
			return fmt.Errorf("list objects of type %T: %w", list, err)
		}
		if meta.LenList(list) > 0 {
			return nil
		}
	}
	policies, err := fences.Policies(namespace)
	if err != nil {
		return err
	}
	for _, obj := range policies {
		installed, err := ByChart(ctx, c, obj)
		if err != nil && !IsAbsent(err) {
			return err
		}
		if installed || err != nil {
			continue
		}
		if err := DeleteIfThere(ctx, c, obj); err != nil {
			return err
		}
	}
	return nil
}

// ByChart reports whether the object that obj names belongs to a release or to the manifests.
func ByChart(ctx context.Context, c client.Client, obj client.Object) (bool, error) {
	have := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
	err := c.Get(ctx, client.ObjectKeyFromObject(obj), have)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read %s %s: %w", kindOf(c, obj), obj.GetName(), err)
	}
	return err == nil && have.GetLabels()[labelInstance] != "", nil
}
