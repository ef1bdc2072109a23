"""The search for the cluster's layout: capacities by simulation, the choice by SCIP, the check by simulation."""
