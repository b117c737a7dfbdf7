package openstack

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/gophercloud/gophercloud/v2"
)

// Errors that Neutron's refusals translate to. Any other error is a malfunction of the cloud, and may pass.
var (
	// ErrGone: the object does not exist, or belongs to another project; Neutron does not distinguish the two.
	ErrGone = errors.New("no such object in this project")
	// ErrQuota: the quota of the project is exhausted.
	ErrQuota = errors.New("the project's quota is exhausted")
	// ErrStale: the object was changed since it was read.
	ErrStale = errors.New("the object was changed meanwhile")
	// ErrTaken: an address, or the target of a floating IP, is in use.
	ErrTaken = errors.New("it is in use")
	// ErrPairs: the port has the maximum of allowed address pairs.
	ErrPairs = errors.New("the port may have no more allowed address pairs (Neutron's max_allowed_address_pair)")
	// ErrForbidden: the credentials do not allow the request; a retry does not help.
	ErrForbidden = errors.New("the credentials do not allow it")
	// ErrInvalid: Neutron cannot process the request, in general or in this network.
	ErrInvalid = errors.New("refused as invalid")
)

// byType maps error types that say more than the status code: an exhausted quota is also a conflict.
var byType = map[string]error{
	"OverQuota":                            ErrQuota,
	"AllowedAddressPairExhausted":          ErrPairs,
	"IpAddressAlreadyAllocated":            ErrTaken,
	"IpAddressGenerationFailure":           ErrQuota, // the subnet has no free address
	"ExternalIpAddressExhausted":           ErrQuota,
	"FloatingIPPortAlreadyAssociated":      ErrTaken,
	"RevisionNumberConstraintFailed":       ErrStale,
	"NetworkNotFound":                      ErrGone,
	"ExternalGatewayForFloatingIPNotFound": ErrInvalid, // no router joins the port's subnet with the floating network
}

var byStatus = map[int]error{
	http.StatusBadRequest:         ErrInvalid,
	http.StatusUnauthorized:       ErrForbidden, // despite a new token: an access rule, or a revoked credential
	http.StatusForbidden:          ErrForbidden,
	http.StatusNotFound:           ErrGone,
	http.StatusConflict:           ErrTaken,
	http.StatusPreconditionFailed: ErrStale,
}

// explain wraps an error of the cloud in one of ours.
func explain(err error) error {
	var refused gophercloud.ErrUnexpectedResponseCode
	if !errors.As(err, &refused) {
		return err
	}
	kind, text := neutronError(refused.Body)
	meaning, ok := byType[kind]
	if !ok {
		meaning, ok = byStatus[refused.Actual]
	}
	if text == "" {
		text = http.StatusText(refused.Actual)
	}
	if !ok {
		return fmt.Errorf("status %d: %s", refused.Actual, text)
	}
	return fmt.Errorf("%w: %s", meaning, text)
}

// neutronError returns the type and the text of an error response.
func neutronError(body []byte) (kind, text string) {
	var neutron struct {
		NeutronError struct{ Type, Message, Detail string }
		Error        struct{ Title, Message string } // Keystone's
	}
	if json.Unmarshal(body, &neutron) != nil {
		return "", ""
	}
	if neutron.Error.Message != "" {
		return neutron.Error.Title, neutron.Error.Message
	}
	return neutron.NeutronError.Type, neutron.NeutronError.Message
}
