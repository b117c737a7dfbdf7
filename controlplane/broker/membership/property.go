package membership

import (
	"context"
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// propertyPolicy is the admission policy in a member, and its binding, that protects its ClusterProperties.
const propertyPolicy = "isthmus-clusterproperties"

// property returns the value of a ClusterProperty, "" without one or without the kind.
func property(ctx context.Context, c client.Client, name string) (string, error) {
	p := &about.ClusterProperty{}
	err := c.Get(ctx, client.ObjectKey{Name: name}, p)
	if err != nil && !admin.IsAbsent(err) {
		return "", fmt.Errorf("read ClusterProperty %s: %w", name, err)
	}
	return p.Spec.Value, nil
}

// identify returns the id with which the cluster behind member joins: the requested one, or its ClusterProperty. It refuses
// a cluster whose ClusterProperties name another id or another ClusterSet.
func identify(ctx context.Context, member client.Client, asked clusterset.ClusterID, clusterSet string) (clusterset.ClusterID, error) {
	said, err := property(ctx, member, about.ClusterID)
	if err != nil {
		return "", err
	}
	id := asked
	switch {
	case said == "" && asked == "":
		return "", fmt.Errorf("this cluster has no id: it has no ClusterProperty %s; give it a unique id with --clusterid, such as its region", about.ClusterID)
	case asked == "":
		if id = clusterset.ClusterID(said); id.Validate() != nil {
			return "", fmt.Errorf("ClusterProperty %s of this cluster is not a valid id: %w", about.ClusterID, id.Validate())
		}
	case said != "" && said != string(asked):
		return "", fmt.Errorf("ClusterProperty %s of this cluster is %s, but --clusterid is %s; join as %s, or change the property first", about.ClusterID, said, asked, said)
	}
	belongs, err := property(ctx, member, about.ClusterSet)
	if err != nil {
		return "", err
	}
	if belongs != "" && belongs != clusterSet {
		return "", fmt.Errorf("ClusterProperty %s of this cluster names ClusterSet %s; let it leave that before it joins %s", about.ClusterSet, belongs, clusterSet)
	}
	return id, id.Validate()
}

// setProperties writes the cluster's id and ClusterSet as ClusterProperties, and protects them by an admission policy. It
// keeps an id that the cluster had before.
func setProperties(ctx context.Context, member client.Client, spec v1alpha1.MemberSpec) (notes []string, err error) {
	said, err := property(ctx, member, about.ClusterID)
	if err != nil {
		return nil, err
	}
	var wanted []client.Object
	if said == "" {
		wanted = append(wanted, clusterProperty(about.ClusterID, spec.ClusterID))
	}
	wanted = append(wanted, clusterProperty(about.ClusterSet, spec.ClusterSetID))
	policy, binding := propertyPolicies()
	for _, obj := range append(wanted, policy, binding) {
		err := admin.Apply(ctx, member, obj)
		if meta.IsNoMatchError(err) && (obj == policy || obj == binding) {
			return []string{"this cluster's Kubernetes has no ValidatingAdmissionPolicy (since 1.30), so its ClusterProperties are not protected"}, nil
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func clusterProperty(name, value string) *about.ClusterProperty {
	return &about.ClusterProperty{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: admin.Ours()},
		Spec:       about.ClusterPropertySpec{Value: value},
	}
}

// propertyPolicies returns the policy that makes both properties immutable while the cluster is a member (KEP-2149), and its
// binding.
func propertyPolicies() (policy, binding client.Object) {
	fail := admissionv1.Fail
	kind := admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Update, admissionv1.Delete},
		Rule:       admissionv1.Rule{APIGroups: []string{about.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"clusterproperties"}},
	}}
	policy = &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: propertyPolicy, Labels: admin.Ours()},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy:    &fail,
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{kind}},
			MatchConditions: []admissionv1.MatchCondition{{
				Name: "well-known", Expression: fmt.Sprintf("request.name in [%q, %q]", about.ClusterID, about.ClusterSet),
			}},
			Validations: []admissionv1.Validation{{
				Expression: `request.operation == "UPDATE" && object.spec.value == oldObject.spec.value`,
				Message:    "this cluster is a member of a ClusterSet, so its id and ClusterSet cannot change before isthmusctl leave",
			}},
		},
	}
	binding = &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: propertyPolicy, Labels: admin.Ours()},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName:        propertyPolicy,
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}
	return policy, binding
}

// clearProperties deletes the objects of setProperties. The API server may enforce a policy for a moment after its
// deletion.
func clearProperties(ctx context.Context, member client.Client) error {
	policy, binding := propertyPolicies()
	for _, obj := range []client.Object{binding, policy} {
		if err := admin.DeleteOwn(ctx, member, obj); err != nil {
			return err
		}
	}
	for _, name := range []string{about.ClusterSet, about.ClusterID} {
		err := admin.Await(ctx, "the API server still refuses to delete ClusterProperty "+name, func() (bool, error) {
			err := admin.DeleteOwn(ctx, member, clusterProperty(name, ""))
			if apierrors.IsInvalid(err) {
				return false, nil
			}
			return err == nil, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
