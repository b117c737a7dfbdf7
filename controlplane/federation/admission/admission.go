// Package admission has the rules of a federation that API servers hold, without a webhook: a claim of an id that
// counts on stays ([Claims]), and a member refuses the writes of leaders that were ([Fence]). Both are
// ValidatingAdmissionPolicies, whose parameter is the object that decides: the Federation, the member's Lease.
package admission

import (
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The names of the policies, and of their bindings.
const (
	ClaimsName = "isthmus-federation-claims"
	FenceName  = "isthmus-federation-fence"
)

// Claims returns the policy, and its binding, by which the claim of the cluster's id can be neither changed nor deleted
// while the cluster's Federation refers to it: names it, or names nobody, as that of a cluster does that leads nobody.
func Claims() []client.Object {
	return rule(ClaimsName, admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: federationv1alpha1.GroupVersion.String(), Kind: "Federation"},
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
			ResourceNames: []string{federationv1alpha1.ClaimID},
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update, admissionv1.Delete},
				Rule:       admissionv1.Rule{APIGroups: []string{federationv1alpha1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"clusterclaims"}},
			},
		}}},
		Variables: []admissionv1.Variable{
			{Name: "members", Expression: `params.spec.?members.orValue([])`},
			{Name: "referred", Expression: `variables.members.size() == 0 || variables.members.exists(m, m.clusterID == oldObject.spec.value)`},
		},
		Validations: []admissionv1.Validation{{
			Expression: `!variables.referred || request.operation == "UPDATE" && object.spec.value == oldObject.spec.value`,
			MessageExpression: `"spec.value is " + oldObject.spec.value + ", by which the Federation of this cluster knows it; ` +
				`it stays until the cluster has left by isthmusctl federation remove"`,
		}},
	}, admissionv1.ParamRef{Name: federationv1alpha1.FederationName}, admissionv1.Fail)
}

// Fence returns the policy, and its binding, by which a member refuses what a supervisor writes that does not hold the
// member's Lease, or in an epoch that is over. Isthmus is installed in namespace. A delete shows no epoch: it is
// refused by who holds the Lease, and otherwise held by its preconditions.
//
// Where there is no Lease, or the API server cannot find it, it refuses nothing. An API server looks for a parameter
// before it asks who writes, so anything else would be a refusal of every write of everybody.
func Fence(namespace string, member clusterset.ClusterID) []client.Object {
	account := fmt.Sprintf("system:serviceaccount:%s:%s", namespace, federationv1alpha1.SupervisorAccountPrefix)
	everything := admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete},
		Rule:       admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}},
	}}
	except := func(group string, resource string) admissionv1.NamedRuleWithOperations {
		e := everything
		e.Rule = admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: []string{resource}}
		return e
	}
	return rule(FenceName, admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
		MatchConstraints: &admissionv1.MatchResources{
			ResourceRules: []admissionv1.NamedRuleWithOperations{everything},
			// By Leases leaders are found, and events say what a supervisor saw.
			ExcludeResourceRules: []admissionv1.NamedRuleWithOperations{
				except("coordination.k8s.io", "leases"), except("", "events"), except("events.k8s.io", "events"),
			},
		},
		MatchConditions: []admissionv1.MatchCondition{{
			Name: "by-a-supervisor", Expression: fmt.Sprintf("request.userInfo.username.startsWith(%q)", account),
		}},
		Variables: []admissionv1.Variable{
			{Name: "supervisor", Expression: fmt.Sprintf("request.userInfo.username.substring(%d)", len(account))},
			{Name: "holder", Expression: `params.spec.?holderIdentity.orValue("")`},
			{Name: "epoch", Expression: `params.spec.?leaseTransitions.orValue(0)`},
			{Name: "said", Expression: fmt.Sprintf(`request.operation == "DELETE" ? "" : object.metadata.?annotations[?%q].orValue("none")`, federationv1alpha1.AnnotationEpoch)},
		},
		Validations: []admissionv1.Validation{
			{
				Expression:        `variables.holder.startsWith(variables.supervisor + "/")`,
				MessageExpression: `"supervisor " + variables.supervisor + " does not lead this cluster; its Lease is held by \"" + variables.holder + "\""`,
				Reason:            new(metav1.StatusReasonForbidden),
			},
			{
				// The metadata of a status is what was there before.
				Expression: `request.operation == "DELETE" || request.?subResource.orValue("") != "" || variables.said.matches("^[0-9]{1,9}$") && int(variables.said) >= variables.epoch`,
				MessageExpression: fmt.Sprintf(`"annotation %s is " + variables.said + ", and this cluster is in epoch " + string(variables.epoch)`,
					federationv1alpha1.AnnotationEpoch),
				Reason: new(metav1.StatusReasonForbidden),
			},
		},
	}, admissionv1.ParamRef{Namespace: namespace, Name: string(member)}, admissionv1.Ignore)
}

// rule returns a policy and its binding to a parameter, without which it refuses nothing; failure says what becomes of
// a request when the API server cannot tell.
func rule(name string, spec admissionv1.ValidatingAdmissionPolicySpec, param admissionv1.ParamRef, failure admissionv1.FailurePolicyType) []client.Object {
	labels := map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}
	spec.FailurePolicy = &failure
	param.ParameterNotFoundAction = new(admissionv1.AllowAction)
	return []client.Object{
		&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: spec},
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ParamRef: &param, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}},
	}
}
