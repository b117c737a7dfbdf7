package membership

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Upgrade is what this version of Isthmus changes in a cluster beside the chart: definitions, admission policies and rights.
type Upgrade struct {
	// Objects are those that change, as kind and name.
	Objects []PlannedObject
	apply   func(context.Context) error
}

// PlannedObject is an object that an upgrade changes.
type PlannedObject struct {
	Object string `json:"object"`
	Change string `json:"change"` // "created" or "changed"
}

// Apply does the upgrade. It may be repeated.
func (u Upgrade) Apply(ctx context.Context) error { return u.apply(ctx) }

// PlanMember plans the upgrade of a member, or of a cluster of a federation. definitions are those of components that the cluster has,
// beside the ones that every cluster needs. It writes nothing.
func PlanMember(ctx context.Context, member client.Client, namespace string, definitions ...*apiextensionsv1.CustomResourceDefinition) (Upgrade, error) {
	plan, err := admin.PlanDefinitions(ctx, member, definitions...)
	if err != nil {
		return Upgrade{}, err
	}
	var policies []client.Object
	members := &v1alpha1.MemberList{}
	if err := member.List(ctx, members, client.InNamespace(namespace)); err != nil && !admin.IsAbsent(err) {
		return Upgrade{}, fmt.Errorf("list Members: %w", err)
	}
	if len(members.Items) > 0 {
		policy, binding := propertyPolicies()
		policies = append(policies, policy, binding)
	}
	u := Upgrade{apply: func(ctx context.Context) error {
		if err := plan.Apply(ctx, member); err != nil {
			return err
		}
		return applyAll(ctx, member, policies)
	}}
	u.Objects, err = trial(ctx, member, append(plan.Objects(), policies...))
	return u, err
}

// PlanBroker plans the upgrade of a broker. Its settings, members and valid files for joining stay. image is the new one of
// isthmus-controller: controllers that run on the broker get its tag and digest, unless theirs is newer. Tombstones and invitations that
// have expired stay for DeployBroker and other commands, which delete them. It writes nothing, and returns ErrNoBroker where there is no
// broker.
func PlanBroker(ctx context.Context, broker client.Client, namespace, image string) (Upgrade, error) {
	config, err := readConfig(ctx, broker, namespace)
	if err != nil {
		return Upgrade{}, err
	}
	definitions, err := admin.PlanDefinitions(ctx, broker)
	if err != nil {
		return Upgrade{}, err
	}
	b := Broker{Namespace: namespace}
	protection, err := b.protection()
	if err != nil {
		return Upgrade{}, err
	}
	quota, err := runningOn(ctx, broker, namespace, v1alpha1.QuotaController)
	if err != nil {
		return Upgrade{}, err
	}
	b.QuotaController = quota.imageLike(image)
	own := quota.keep(b.quotaObjects())
	optional, err := b.optional(ctx, broker, image)
	if err != nil {
		return Upgrade{}, err
	}
	own = append(own, optional...)
	for _, m := range config.Spec.Members {
		if m.Credential == "" { // deploy gives it one
			continue
		}
		rights, err := rightsOf(ctx, broker, namespace, m.ClusterID, m.Credential)
		if err != nil {
			return Upgrade{}, err
		}
		own = append(own, rights...)
	}
	u := Upgrade{apply: func(ctx context.Context) error {
		settled := b
		settled.QuotaController = "" // it is among own
		if _, err := settled.deploy(ctx, broker); err != nil {
			return err
		}
		return applyAll(ctx, broker, own)
	}}
	if u.Objects, err = trial(ctx, broker, slices.Concat(definitions.Objects(), protection, own)); err != nil {
		return Upgrade{}, err
	}
	// deploy gives members a credential, and lets readers of the former definition have the fields that it lacked.
	old := func(m v1alpha1.MemberBlocks) bool { return m.Credential == "" }
	if definitions.Extends(configDefinition) || slices.ContainsFunc(config.Spec.Members, old) {
		u.Objects = append(u.Objects, PlannedObject{"ClusterSetConfig " + client.ObjectKeyFromObject(config).String(), "changed"})
	}
	return u, nil
}

// optional returns the objects that only some brokers have, if this one has them: the rights of files that admit any cluster, and the
// bridge to Lighthouse.
func (b Broker) optional(ctx context.Context, broker client.Client, image string) ([]client.Object, error) {
	var own []client.Object
	role := joinRole(b.Namespace)
	switch err := broker.Get(ctx, client.ObjectKeyFromObject(role), &rbacv1.Role{}); {
	case err == nil:
		own = append(own, role)
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read Role %s: %w", client.ObjectKeyFromObject(role), err)
	}
	bridge, err := runningOn(ctx, broker, b.Namespace, v1alpha1.LighthouseBridge)
	if err != nil {
		return nil, err
	}
	there, ok := bridge.flag("--lighthouse-bridge")
	if !ok {
		return own, nil
	}
	l := LighthouseBridge{Namespace: b.Namespace, Lighthouse: there, Image: bridge.imageLike(image)}
	rights, err := l.rights(ctx, broker)
	return slices.Concat(own, bridge.keep(l.objects()), []client.Object{rights}), err
}

// applyAll writes objects.
func applyAll(ctx context.Context, c client.Client, objects []client.Object) error {
	for _, obj := range objects {
		if err := admin.Apply(ctx, c, obj); err != nil {
			return err
		}
	}
	return nil
}

// trial returns those of objects that a write would change.
func trial(ctx context.Context, c client.Client, objects []client.Object) ([]PlannedObject, error) {
	var changed []PlannedObject
	for _, obj := range objects {
		name, effect, err := admin.Trial(ctx, c, obj)
		if err != nil {
			return nil, err
		}
		if effect != admin.None {
			changed = append(changed, PlannedObject{name, string(effect)})
		}
	}
	return changed, nil
}

// deployment is a Deployment on the broker; nil if there is none.
type deployment struct{ *appsv1.Deployment }

// runningOn returns the Deployment of a controller on the broker.
func runningOn(ctx context.Context, broker client.Client, namespace, name string) (deployment, error) {
	d := &appsv1.Deployment{}
	err := broker.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, d)
	if apierrors.IsNotFound(err) {
		return deployment{}, nil
	}
	if err != nil {
		return deployment{}, fmt.Errorf("read Deployment %s/%s on the broker: %w", namespace, name, err)
	}
	return deployment{d}, nil
}

// imageLike returns the Deployment's image with the tag and digest of image, "" without a Deployment.
func (d deployment) imageLike(image string) string {
	if d.Deployment == nil || len(d.Spec.Template.Spec.Containers) == 0 {
		return ""
	}
	have := d.Spec.Template.Spec.Containers[0].Image
	if image == "" {
		return have
	}
	repository, old := cutTag(have)
	_, tag := cutTag(image)
	there, err1 := version.ParseSemantic(withoutDigest(old))
	now, err2 := version.ParseSemantic(withoutDigest(tag))
	if err1 == nil && err2 == nil && there.GreaterThan(now) { // another member was upgraded further
		return have
	}
	return repository + tag
}

// keep gives the Deployment among objects the replicas that d has, and its pull secrets unless others are given.
func (d deployment) keep(objects []client.Object) []client.Object {
	for _, o := range objects {
		want, ok := o.(*appsv1.Deployment)
		if !ok || d.Deployment == nil {
			continue
		}
		want.Spec.Replicas = d.Spec.Replicas
		if pod := &want.Spec.Template.Spec; pod.ImagePullSecrets == nil {
			pod.ImagePullSecrets = d.Spec.Template.Spec.ImagePullSecrets
		}
	}
	return objects
}

// flag returns the value of a flag of the Deployment's program.
func (d deployment) flag(name string) (value string, ok bool) {
	if d.Deployment == nil {
		return "", false
	}
	for _, c := range d.Spec.Template.Spec.Containers {
		for _, arg := range c.Args {
			if value, ok := strings.CutPrefix(arg, name+"="); ok {
				return value, true
			}
		}
	}
	return "", false
}

// withoutDigest returns the tag alone, of a tag and digest with their separators.
func withoutDigest(tag string) string {
	name, _, _ := strings.Cut(tag, "@")
	return strings.TrimPrefix(name, ":")
}

// cutTag splits an image's name into the repository, and the tag and digest with their separators.
func cutTag(image string) (repository, tag string) {
	name, _, _ := strings.Cut(image, "@")
	end := len(name)
	if i := strings.LastIndex(name, ":"); i > strings.LastIndex(name, "/") {
		end = i
	}
	return image[:end], image[end:]
}
