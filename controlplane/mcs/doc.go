// Package mcs translates between the domain (controlplane/clusterset) and the Kubernetes objects that
// carry it: ServiceExport, ServiceImport and EndpointSlice of users and of the MCS API, ExportRecord of
// our own. Pure functions: no client, no context, no clock, no log. No function changes its arguments,
// and no result shares memory with them unless its comment says so.
//
// The road of an exported Service, with the function of each step:
//
//	ServiceExport, Service    -> Export          what this member says
//	Export                    -> ExportRecord    ... as an object of the broker; ParseRecord reads it back
//	EndpointSlice of a member -> BrokerSlice     its endpoints, as an object of the broker
//	Import (merged)           -> ServiceImport   what every member sees; Import reads it back
//	BrokerSlice               -> ImportedSlice   ... with its endpoints; Slice reads it back
package mcs
