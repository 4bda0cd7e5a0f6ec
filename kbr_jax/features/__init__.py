"""Exact and low-rank views of a sample's Gram matrix."""

from ._cells import SoftCells as SoftCells
from ._cells import soft_cells as soft_cells
from ._features import AbstractFeatureMap as AbstractFeatureMap
from ._features import AbstractFeatures as AbstractFeatures
from ._features import AbstractGramFeatures as AbstractGramFeatures
from ._features import ExactFeatures as ExactFeatures
from ._features import encode as encode
from ._features import exact_features as exact_features
from ._iterative import ConjugateGradient as ConjugateGradient
from ._iterative import ConjugateGradientFactor as ConjugateGradientFactor
from ._iterative import IterativeFeatures as IterativeFeatures
from ._iterative import SolveReport as SolveReport
from ._iterative import iterative_features as iterative_features
from ._landmarks import IncompleteCholesky as IncompleteCholesky
from ._landmarks import LandmarkFeatures as LandmarkFeatures
from ._landmarks import Landmarks as Landmarks
from ._landmarks import fit_features as fit_features
from ._landmarks import given_landmarks as given_landmarks
from ._landmarks import greedy_landmarks as greedy_landmarks
from ._landmarks import incomplete_cholesky as incomplete_cholesky
from ._landmarks import landmark_features as landmark_features
from ._landmarks import random_landmarks as random_landmarks
from ._landmarks import uniform_landmarks as uniform_landmarks
