"""Exact and low-rank views of a sample's Gram matrix."""

from ._choice import FeatureChoice as FeatureChoice
from ._choice import fit_features as fit_features
from ._features import AbstractFeatureMap as AbstractFeatureMap
from ._features import AbstractFeatures as AbstractFeatures
from ._features import ExactFeatures as ExactFeatures
from ._features import exact_features as exact_features
from ._fourier import FourierFeatures as FourierFeatures
from ._fourier import Frequencies as Frequencies
from ._fourier import fourier_features as fourier_features
from ._fourier import fourier_frequencies as fourier_frequencies
from ._landmarks import LandmarkFeatures as LandmarkFeatures
from ._landmarks import Landmarks as Landmarks
from ._landmarks import given_landmarks as given_landmarks
from ._landmarks import landmark_features as landmark_features
from ._sampling import kmeans_landmarks as kmeans_landmarks
from ._sampling import stream_landmarks as stream_landmarks
from ._selection import IncompleteCholesky as IncompleteCholesky
from ._selection import greedy_landmarks as greedy_landmarks
from ._selection import incomplete_cholesky as incomplete_cholesky
from ._selection import random_landmarks as random_landmarks
from ._selection import uniform_landmarks as uniform_landmarks
