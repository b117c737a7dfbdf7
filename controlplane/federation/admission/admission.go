// Package admission has the rules of a federation that API servers hold, without a webhook: a claim of an id that
// counts on stays ([Claims]), a member refuses the writes of leaders that were ([Fence]), and those of supervisors to
// what is not the federation's ([Own]). All are ValidatingAdmissionPolicies; the parameter of the first two is the
// object that decides: the Federation, the member's Lease.
package admission

import (
	"fmt"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	OwnName    = "isthmus-federation-own"
)

// Claims returns the policy, and its binding, by which the claim of the cluster's id can be neither changed nor deleted
// while the cluster's Federation refers to it: names it, or names nobody, as that of a cluster does that leads nobody.
func Claims() []client.Object {
	return rule(ClaimsName, admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: federationv1alpha1.GroupVersion.String(), Kind: "Federation"},
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update, admissionv1.Delete},
				Rule:       admissionv1.Rule{APIGroups: []string{federationv1alpha1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"clusterclaims"}},
			},
		}}},
		// By name, and not by the resource's name: a request to delete a whole collection has none.
		MatchConditions: []admissionv1.MatchCondition{{
			Name: "of-the-id", Expression: fmt.Sprintf("oldObject.metadata.name == %q", federationv1alpha1.ClaimID),
		}},
		Variables: []admissionv1.Variable{
			{Name: "members", Expression: `params.spec.?members.orValue([])`},
			{Name: "referred", Expression: `variables.members.size() == 0 || variables.members.exists(m, m.clusterID == oldObject.spec.value)`},
		},
		Validations: []admissionv1.Validation{{
			Expression: `!variables.referred || request.operation == "UPDATE" && object.spec.value == oldObject.spec.value`,
			MessageExpression: `"spec.value is " + oldObject.spec.value + ", by which the Federation of this cluster knows it; ` +
				`it stays until the cluster has left by isthmusctl federation remove"`,
		}},
	}, &admissionv1.ParamRef{Name: federationv1alpha1.FederationName}, admissionv1.Fail)
}

// Fence returns the policy, and its binding, by which a member refuses what a supervisor writes that does not hold the
// member's Lease, or in an epoch that is over. Isthmus is installed in namespace. A delete and the write of a status
// show no epoch; what counts there is that of the object which stands in the member.
//
// Where there is no Lease, or the API server cannot find it, it refuses nothing. An API server looks for a parameter
// before it asks who writes, so anything else would be a refusal of every write of everybody.
func Fence(namespace string, member clusterset.ClusterID) []client.Object {
	spec := ofSupervisors(namespace)
	spec.ParamKind = &admissionv1.ParamKind{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	spec.Variables = []admissionv1.Variable{
		{Name: "supervisor", Expression: fmt.Sprintf("request.userInfo.username.substring(%d)", len(accounts(namespace)))},
		{Name: "holder", Expression: `params.spec.?holderIdentity.orValue("")`},
		{Name: "epoch", Expression: `params.spec.?leaseTransitions.orValue(0)`},
		{Name: "shown", Expression: `request.operation == "DELETE" || request.operation == "UPDATE" && request.?subResource.orValue("") != "" ? oldObject : object`},
		{Name: "said", Expression: fmt.Sprintf(`variables.shown.metadata.?annotations[?%q].orValue("none")`, federationv1alpha1.AnnotationEpoch)},
	}
	spec.Validations = []admissionv1.Validation{
		{
			Expression:        `variables.holder.startsWith(variables.supervisor + "/")`,
			MessageExpression: `"supervisor " + variables.supervisor + " does not lead this cluster; its Lease is held by \"" + variables.holder + "\""`,
			Reason:            new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `variables.said.matches("^[0-9]{1,9}$") && int(variables.said) >= variables.epoch`,
			MessageExpression: fmt.Sprintf(`"annotation %s is " + variables.said + ", and this cluster is in epoch " + string(variables.epoch)`,
				federationv1alpha1.AnnotationEpoch),
			Reason: new(metav1.StatusReasonForbidden),
		},
	}
	return rule(FenceName, spec, &admissionv1.ParamRef{Namespace: namespace, Name: string(member)}, admissionv1.Ignore)
}

// notes are the annotations that leaders put on what is somebody else's.
var notes = []string{
	federationv1alpha1.AnnotationEpoch, federationv1alpha1.AnnotationServiceStatus, federationv1alpha1.AnnotationPolicyStatus,
}

// wishes are the annotations by which people ask for something to reach other members. No leader writes one.
var wishes = []string{
	federationv1alpha1.AnnotationGlobalService, federationv1alpha1.AnnotationGlobalServiceAntreaTanzu, federationv1alpha1.AnnotationGlobalServiceAntrea,
	federationv1alpha1.AnnotationService, federationv1alpha1.AnnotationServiceAntreaTanzu, federationv1alpha1.AnnotationServiceAntrea,
	federationv1alpha1.AnnotationPolicy, federationv1alpha1.AnnotationPolicyAntrea,
	federationv1alpha1.AnnotationAskHostname, federationv1alpha1.MarkVirtualMachines,
}

// sameSpec is that nothing of a spec changes. Of a Service that became an ExternalName the API server keeps the
// internalTrafficPolicy that it had, and does not show it in oldObject: it always seems to change, and means nothing.
const sameSpec = `object.spec == oldObject.spec || request.kind.group == "" && request.kind.kind == "Service" && ` +
	`object.spec.type == "ExternalName" && ["type", "externalName", "ports", "selector", "clusterIP", "clusterIPs", "ipFamilies", ` +
	`"ipFamilyPolicy", "externalIPs", "sessionAffinity", "sessionAffinityConfig", "loadBalancerIP", "loadBalancerSourceRanges", ` +
	`"loadBalancerClass", "allocateLoadBalancerNodePorts", "externalTrafficPolicy", "healthCheckNodePort", ` +
	`"publishNotReadyAddresses", "trafficDistribution"].all(f, object.spec[?f] == oldObject.spec[?f])`

// Own returns the policy, and its binding, by which a member refuses that a supervisor makes, changes or removes what is
// not the federation's by its label. On what is somebody else's, leaders may put what they note there, and on nothing
// what people ask by: leaders of other members would do as it says.
func Own(namespace string) []client.Object {
	const ours = `(has(%[1]s.metadata.labels) && (%[1]s.metadata.labels[?%[2]q].orValue("") == %[4]q || %[1]s.metadata.labels[?%[3]q].orValue("") == %[4]q))`
	is := func(object string) string {
		return fmt.Sprintf(ours, object, v1alpha1.LabelManagedBy, discoveryv1.LabelManagedBy, federationv1alpha1.ManagedBy)
	}
	spec := ofSupervisors(namespace)
	spec.Variables = []admissionv1.Variable{
		{Name: "before", Expression: `request.operation == "CREATE" || ` + is("oldObject")},
		{Name: "after", Expression: `request.operation == "DELETE" || ` + is("object")},
		{Name: "was", Expression: `request.operation == "CREATE" ? {} : oldObject.metadata.?annotations.orValue({})`},
		{Name: "is", Expression: `request.operation == "DELETE" ? {} : object.metadata.?annotations.orValue({})`},
		{Name: "differs", Expression: `variables.is.map(k, !(k in variables.was) || variables.was[k] != variables.is[k], k) + ` +
			`variables.was.map(k, request.operation == "UPDATE" && !(k in variables.is), k)`},
		{Name: "same", Expression: sameSpec},
		{Name: "annotated", Expression: `request.operation == "UPDATE" && has(object.spec) && has(oldObject.spec) && variables.same && ` +
			`["labels", "ownerReferences", "finalizers"].all(f, object.metadata[?f].orValue([]) == oldObject.metadata[?f].orValue([])) && ` +
			`variables.differs.all(k, k in ` + list(notes) + `)`},
	}
	spec.Validations = []admissionv1.Validation{
		{
			Expression: `variables.before && variables.after || request.?subResource.orValue("") == "" && variables.annotated`,
			Message: fmt.Sprintf("a supervisor may write what has the label %s=%s or %s=%[2]s, and on anything else the annotations %s",
				v1alpha1.LabelManagedBy, federationv1alpha1.ManagedBy, discoveryv1.LabelManagedBy, strings.Join(notes, ", ")),
			Reason: new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `!variables.is.exists(k, k in variables.differs && k in ` + list(wishes) + `)`,
			Message:    "a supervisor may not ask for what people ask for by annotations: " + strings.Join(wishes, ", "),
			Reason:     new(metav1.StatusReasonForbidden),
		},
	}
	return rule(OwnName, spec, nil, admissionv1.Fail)
}

// list returns texts as a list in CEL.
func list(texts []string) string {
	var quoted []string
	for _, text := range texts {
		quoted = append(quoted, strconv.Quote(text))
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// accounts is how the names of all supervisors' accounts begin.
func accounts(namespace string) string {
	return fmt.Sprintf("system:serviceaccount:%s:%s", namespace, federationv1alpha1.SupervisorAccountPrefix)
}

// ofSupervisors returns a policy of all that supervisors write, apart from Leases, by which leaders are found, and
// events, which say what a supervisor saw.
func ofSupervisors(namespace string) admissionv1.ValidatingAdmissionPolicySpec {
	everything := admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete},
		Rule:       admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}},
	}}
	except := func(group string, resource string) admissionv1.NamedRuleWithOperations {
		e := everything
		e.Rule = admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: []string{resource}}
		return e
	}
	return admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{
			ResourceRules: []admissionv1.NamedRuleWithOperations{everything},
			ExcludeResourceRules: []admissionv1.NamedRuleWithOperations{
				except("coordination.k8s.io", "leases"), except("", "events"), except("events.k8s.io", "events"),
			},
		},
		MatchConditions: []admissionv1.MatchCondition{{
			Name: "by-a-supervisor", Expression: fmt.Sprintf("request.userInfo.username.startsWith(%q)", accounts(namespace)),
		}},
	}
}

// rule returns a policy and its binding: to a parameter, without which it refuses nothing, unless param is nil. failure
// says what becomes of a request when the API server cannot tell.
func rule(name string, spec admissionv1.ValidatingAdmissionPolicySpec, param *admissionv1.ParamRef, failure admissionv1.FailurePolicyType) []client.Object {
	labels := map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}
	spec.FailurePolicy = &failure
	if param != nil {
		param.ParameterNotFoundAction = new(admissionv1.AllowAction)
	}
	return []client.Object{
		&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: spec},
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ParamRef: param, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}},
	}
}
