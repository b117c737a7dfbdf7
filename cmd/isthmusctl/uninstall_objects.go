package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	gatewayv1alpha1 "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	gatewayservice "github.com/isthmus-net/isthmus/gateway/service"
)

// pollDefinitions is the interval of questions for definitions that are being deleted.
const pollDefinitions = time.Second

// otherWorkloads reports whether a namespace has workloads of Isthmus that kubectl has applied. It returns an error for those of another
// Helm release than the given one, which does not exist.
func otherWorkloads(ctx context.Context, c client.Client, namespace, release string) (bool, error) {
	ours := []client.ListOption{client.InNamespace(namespace), client.MatchingLabels{"app.kubernetes.io/part-of": "isthmus"}}
	sets, deployments := &appsv1.DaemonSetList{}, &appsv1.DeploymentList{}
	if err := errors.Join(c.List(ctx, sets, ours...), c.List(ctx, deployments, ours...)); err != nil {
		return false, fmt.Errorf("list workloads: %w", err)
	}
	var all []client.Object
	for i := range sets.Items {
		all = append(all, &sets.Items[i])
	}
	for i := range deployments.Items {
		all = append(all, &deployments.Items[i])
	}
	for _, o := range all {
		if other := o.GetAnnotations()["meta.helm.sh/release-name"]; other != "" {
			return false, fmt.Errorf("there is no Helm release %s in namespace %s, but %s belongs to Helm release %s: give --release %s, and $HELM_DRIVER as for helm", release, namespace, o.GetName(), other, other)
		}
	}
	return len(all) > 0, nil
}

// addresses is the step that abandons addresses in the cloud. Without the flag it refuses if there are any.
func (u *uninstallation) addresses(ctx context.Context) (removal, error) {
	s := removal{name: "addresses", what: "no Service has an address of the gateways"}
	held, err := u.holders(ctx)
	if err != nil || len(held) == 0 {
		return s, err
	}
	var names []string
	for _, o := range held {
		names = append(names, strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/"))
	}
	switch all := strings.Join(names, ", "); {
	case !u.abandon:
		return s.refuse("the gateways' controller holds addresses in the cloud for %s: delete these Services and GatewayNodes first, and it releases them; or give --abandon-addresses", all), nil
	case u.byManifest:
		return s.refuse("the controller takes the addresses of %s again as long as it runs: delete what kubectl applied first, then run this command", all), nil
	default:
		s.what = "leave the addresses of " + all + " in the cloud, and let go of these objects"
	}
	s.do = func(ctx context.Context) error {
		held, err := u.holders(ctx)
		for _, o := range held {
			err = errors.Join(err, u.letGo(ctx, o))
		}
		return err
	}
	return s, nil
}

// holders returns the Services and GatewayNodes with a finalizer of the gateways' controller.
func (u *uninstallation) holders(ctx context.Context) ([]client.Object, error) {
	services, nodes := &corev1.ServiceList{}, &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(gatewayv1alpha1.GroupVersion.WithKind("GatewayNodeList"))
	if err := u.cluster.List(ctx, services); err != nil {
		return nil, fmt.Errorf("list Services: %w", err)
	}
	if err := u.cluster.List(ctx, nodes); err != nil && !isAbsent(err) {
		return nil, fmt.Errorf("list GatewayNodes: %w", err)
	}
	var held []client.Object
	for i := range services.Items {
		if o := &services.Items[i]; controllerutil.ContainsFinalizer(o, gatewayservice.Finalizer) {
			held = append(held, o)
		}
	}
	for i := range nodes.Items {
		o := &nodes.Items[i]
		o.SetGroupVersionKind(gatewayv1alpha1.GroupVersion.WithKind("GatewayNode"))
		if controllerutil.ContainsFinalizer(o, gatewayv1alpha1.Finalizer) {
			held = append(held, o)
		}
	}
	return held, nil
}

// letGo removes the finalizers of the gateways' controller from an object.
func (u *uninstallation) letGo(ctx context.Context, o client.Object) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := u.cluster.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return client.IgnoreNotFound(err)
		}
		before, ok := o.DeepCopyObject().(client.Object)
		if !ok {
			return fmt.Errorf("%T is no object", o)
		}
		controllerutil.RemoveFinalizer(o, gatewayservice.Finalizer)
		controllerutil.RemoveFinalizer(o, gatewayv1alpha1.Finalizer)
		return client.IgnoreNotFound(u.cluster.Patch(ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
	})
	if err != nil {
		return fmt.Errorf("remove the finalizer of %s: %w", o.GetName(), err)
	}
	return nil
}

// deleteDefinitions is the step that deletes the definitions of isthmus.dev.
func (u *uninstallation) deleteDefinitions(ctx context.Context) (removal, error) {
	s := removal{name: "definitions", what: "stay"}
	if !u.definitions {
		return s, nil
	}
	if u.byManifest {
		return s.refuse("--definitions: programs that kubectl applied still use them: kubectl delete -f isthmus.yaml first, then run this command again"), nil
	}
	configs := &v1alpha1.ClusterSetConfigList{}
	if err := u.cluster.List(ctx, configs); err != nil && !isAbsent(err) {
		return s, fmt.Errorf("list ClusterSetConfigs: %w", err)
	}
	if len(configs.Items) > 0 {
		return s.refuse("--definitions: namespace %s of this cluster is a broker, whose members and settings would be lost; delete that namespace first if its ClusterSet has ended", configs.Items[0].Namespace), nil
	}
	ours, err := u.ownDefinitions(ctx)
	if err != nil {
		return s, err
	}
	s.what = fmt.Sprintf("delete %d definitions of isthmus.dev and all objects of these kinds", len(ours))
	s.do = func(ctx context.Context) error {
		for i := range ours {
			if err := client.IgnoreNotFound(u.cluster.Delete(ctx, &ours[i])); err != nil {
				return fmt.Errorf("delete CustomResourceDefinition %s: %w", ours[i].Name, err)
			}
		}
		return u.awaitNoDefinitions(ctx)
	}
	return s, nil
}

// ownDefinitions returns the definitions of isthmus.dev.
func (u *uninstallation) ownDefinitions(ctx context.Context) ([]apiextensionsv1.CustomResourceDefinition, error) {
	all := &apiextensionsv1.CustomResourceDefinitionList{}
	if err := u.cluster.List(ctx, all); err != nil {
		return nil, fmt.Errorf("list CustomResourceDefinitions: %w", err)
	}
	var ours []apiextensionsv1.CustomResourceDefinition
	for _, d := range all.Items {
		if group := d.Spec.Group; group == v1alpha1.GroupVersion.Group || strings.HasSuffix(group, "."+v1alpha1.GroupVersion.Group) {
			ours = append(ours, d)
		}
	}
	return ours, nil
}

// awaitNoDefinitions waits until the definitions of isthmus.dev are gone, and names those that an object with a finalizer keeps.
func (u *uninstallation) awaitNoDefinitions(ctx context.Context) error {
	var left []apiextensionsv1.CustomResourceDefinition
	err := wait.PollUntilContextTimeout(ctx, pollDefinitions, u.timeout, true, func(ctx context.Context) (bool, error) {
		var err error
		left, err = u.ownDefinitions(ctx)
		return err == nil && len(left) == 0, nil
	})
	if err != nil {
		var names []string
		for _, d := range left {
			names = append(names, d.Name)
		}
		return fmt.Errorf("%s are still there, because objects of these kinds have finalizers: see kubectl get and remove those of controllers that no longer run: %w", strings.Join(names, ", "), err)
	}
	return nil
}
