package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/writers"
)

// The agent believes the labels by which the controllers of Isthmus mark their objects, so it reads whether an admission policy
// reserves them.
//
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicies;validatingadmissionpolicybindings,resourceNames=isthmus-reserved-labels.isthmus.dev,verbs=get

const (
	// reservedPolicy is the name of the policy and of its binding, which the chart and isthmusctl join install.
	reservedPolicy = "isthmus-reserved-labels.isthmus.dev"
	// reservedInterval is the time between two looks for the policy, and the first wait after an error.
	reservedInterval = 10 * time.Minute
	reservedRetry    = 10 * time.Second
)

const admissionPath = "/apis/admissionregistration.k8s.io/v1/"

// errUnreserved is the fault of a cluster in which anyone may write objects that look like those of Isthmus.
var errUnreserved = errors.New("anyone who may create ServiceImports can have nodes serve them as if Isthmus had written them; run isthmusctl join again, or upgrade the Helm release, to install the policy")

// reservedLabels watches whether the admission policy for the labels of Isthmus is in force.
type reservedLabels struct {
	server rest.Interface
	log    *slog.Logger

	mu    sync.Mutex
	known bool  // whether the policy is in force
	fault error // the reason why it is not, and the fix
}

// newReservedLabels returns nil if the agent does not rely on the policy.
func newReservedLabels(cfg *Config, server rest.Interface, log *slog.Logger) *reservedLabels {
	if server == nil || cfg.imports() == writers.Any {
		return nil
	}
	return &reservedLabels{server: server, log: log}
}

// Status returns whether it is known if the policy is in force, and the reason why it is not. r may be nil.
func (r *reservedLabels) Status() (known bool, fault error) {
	if r == nil {
		return false, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known, r.fault
}

// Run looks for the policy until ctx is done; then it returns nil.
func (r *reservedLabels) Run(ctx context.Context) error {
	logged := ""
	for retry := reservedRetry; ; {
		wait := reservedInterval
		if fault, err := r.look(ctx); err == nil {
			r.note(fault)
			retry = reservedRetry
		} else {
			if text := err.Error(); text != logged && ctx.Err() == nil {
				r.log.Info("cannot read whether the labels of Isthmus are reserved", "policy", reservedPolicy, "err", err)
				logged = text
			}
			wait, retry = retry, min(2*retry, reservedInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// look returns the reason why the policy is not in force, nil if it is. err says that this is unknown.
func (r *reservedLabels) look(ctx context.Context) (fault, err error) {
	var policy admissionv1.ValidatingAdmissionPolicy
	var binding admissionv1.ValidatingAdmissionPolicyBinding
	for resource, into := range map[string]any{"validatingadmissionpolicies": &policy, "validatingadmissionpolicybindings": &binding} {
		err := getObject(ctx, r.server, admissionPath+resource+"/"+reservedPolicy, into)
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("the admission policy %s or its binding is missing: %w", reservedPolicy, errUnreserved), nil
		}
		if err != nil {
			return nil, err
		}
	}
	if binding.Spec.PolicyName != reservedPolicy || !slices.Contains(binding.Spec.ValidationActions, admissionv1.Deny) {
		return fmt.Errorf("the binding of the admission policy %s denies nothing: %w", reservedPolicy, errUnreserved), nil
	}
	return nil, nil
}

// note records a result, and logs it if it differs from the last one.
func (r *reservedLabels) note(fault error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case fault != nil && r.fault == nil:
		r.log.Warn("the labels of Isthmus are not reserved", "err", fault)
	case fault == nil && r.fault != nil:
		r.log.Info("the labels of Isthmus are reserved again", "policy", reservedPolicy)
	}
	r.known, r.fault = true, fault
}
